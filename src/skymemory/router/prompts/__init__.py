"""Prompts of requests, as bytes or tokens."""
