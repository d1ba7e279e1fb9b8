"""Mooncake's experiments on the simulated cluster."""
