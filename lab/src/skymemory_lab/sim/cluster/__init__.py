"""A serving cluster in virtual time."""
