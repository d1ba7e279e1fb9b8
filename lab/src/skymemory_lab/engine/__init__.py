"""A transformers model behind an OpenAI-compatible HTTP API."""
