"""A transformers model behind an OpenAI-compatible door."""
