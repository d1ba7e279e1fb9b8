"""Index of stored blocks on the ground: a radix index and its journal. Pure."""
