"""From settings to live objects: the only room that chooses implementations."""
