"""Prefill and decode scheduling after Mooncake."""
