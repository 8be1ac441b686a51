"""One self-contained HTML page from a run directory."""

from tether.report.page import write_report

__all__ = ["write_report"]
