"""Hierarchy of stores, each with its own threads, deadlines and circuit breaker."""
