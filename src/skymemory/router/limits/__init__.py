"""Limits of the HTTP proxy's door, which clients share: pure objects, times in, decisions out. The holder pays."""
