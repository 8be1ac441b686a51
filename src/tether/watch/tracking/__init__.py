"""Trackers beside a run: they follow its files."""
