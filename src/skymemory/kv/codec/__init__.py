"""Codecs of KV blocks, each with its measured size and loss."""
