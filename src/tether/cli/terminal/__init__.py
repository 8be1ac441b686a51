"""Output in a terminal or a notebook: progress, tables, results. Commands and the Python interface share it."""
