"""Stages: one file for each way to learn, to collect, or to compare."""
