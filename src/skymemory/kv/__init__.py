"""What is cached: contexts, block hashes, layouts, chunks, stored values and their codecs. Pure."""
