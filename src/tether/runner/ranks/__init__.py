"""Ranks of a training: their start, their return after a loss, and the program that each runs."""
