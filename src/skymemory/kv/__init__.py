"""Cached data: contexts, block hashes, layouts, stored values and their codecs. Pure."""
