"""Request routing: servers and their caches, strategies, schedulers and admission rules.

The package does no I/O and reads no clock: callers pass ``now_s``.
"""
