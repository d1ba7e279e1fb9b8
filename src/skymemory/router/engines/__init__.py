"""Input from engines: their metrics, and the events of their KV caches."""
