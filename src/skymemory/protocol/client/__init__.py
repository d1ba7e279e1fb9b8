"""A ground host's side of the protocol."""
