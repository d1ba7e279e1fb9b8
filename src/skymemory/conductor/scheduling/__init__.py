"""Prefill and decode scheduling after Mooncake: choice of the prefill server, its loads, and the decode server."""
