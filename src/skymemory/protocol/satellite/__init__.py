"""A satellite's side of the protocol."""
