"""The endpoint picker that Envoy asks."""
