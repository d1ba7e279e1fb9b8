"""Simulators and models: latency of the constellation, KV loading, routing, clusters, and their requests."""
