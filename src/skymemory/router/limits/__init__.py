"""Limits of resources that clients of the HTTP proxy share. Pure: the time is an argument."""
