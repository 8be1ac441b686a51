"""Memory and time of a recipe, before anything is loaded."""
