"""Routing strategies, each in its own file; their contract is ``picker.Scorer``."""
