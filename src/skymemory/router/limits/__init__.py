"""Limits of resources that clients of the HTTP proxy share. Pure objects: they get the time and return decisions."""
