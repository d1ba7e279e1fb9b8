"""Codecs that compress the bytes of a KV block, each with its measured size and loss."""
