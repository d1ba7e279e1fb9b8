"""Routing strategies; their contract is ``picker.Scorer``."""
