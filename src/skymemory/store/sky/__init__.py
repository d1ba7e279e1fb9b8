"""The constellation as a tier."""
