"""Codecs: the bytes of one KV block to fewer bytes and back, each with its measured size and loss."""
