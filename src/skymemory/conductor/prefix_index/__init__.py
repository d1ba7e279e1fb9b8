"""Prefix indices: which server holds how much of a prompt, estimated from requests or known from engines' events."""
