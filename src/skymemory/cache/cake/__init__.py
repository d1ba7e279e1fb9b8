"""Cake: a prompt loaded from one end and computed from the other."""
