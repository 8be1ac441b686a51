"""Align language models with human preferences, and know whether they got better."""

__version__ = "0.1.0"
