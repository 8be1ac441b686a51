"""Experiments of this project over the public API."""
