"""Index of stored blocks on the ground: a radix index, its journal, and the search without an index. Pure."""
