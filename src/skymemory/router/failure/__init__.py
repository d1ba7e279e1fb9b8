"""Blame for failures, retries, and ejection. Pure: ``now_s`` is an argument."""
