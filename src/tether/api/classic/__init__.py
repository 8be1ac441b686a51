"""The parts of `tether.classic`."""
