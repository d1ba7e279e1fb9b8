"""A serving cluster from a single description."""
