"""Blame for failures, retries, and servers that get no requests. Pure: ``now_s`` is an argument."""
