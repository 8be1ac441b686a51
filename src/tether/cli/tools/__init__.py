"""Commands on a recipe or on a finished run."""
