"""Input from engines: metrics, and events of their KV caches."""
