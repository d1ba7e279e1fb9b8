"""What comes in from engines: their metrics, and the events of their KV caches."""
