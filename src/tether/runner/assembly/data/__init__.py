"""Rows of a stage: the sources that a recipe names, the prompts that a model can answer, and those that fit a budget."""
