"""One self-contained HTML page from a run directory: `report.page.write_report`."""
