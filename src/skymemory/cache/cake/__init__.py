"""Cake: a prompt is loaded from the back while it is computed from the front."""
