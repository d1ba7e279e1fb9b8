"""Satellite side of the protocol."""
