"""Prefix indices: the part of a prompt that each server holds, estimated from requests or known from KV events."""
