"""Evaluators: their table, the lists of them (suites), and the tasks of lm-eval."""
