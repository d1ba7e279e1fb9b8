"""The prompts of requests, as bytes or tokens."""
