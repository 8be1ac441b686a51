"""Order of the stages of a recipe, on which ranks they run, and how a run goes on."""
