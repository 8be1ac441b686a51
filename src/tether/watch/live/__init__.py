"""Views of runs while they train: readers of run directories, without a hook in the training."""
