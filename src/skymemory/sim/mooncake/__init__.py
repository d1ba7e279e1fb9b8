"""Mooncake's experiments in our simulator: what was published, what ours gives, and why the two differ."""
