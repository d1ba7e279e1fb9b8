"""SkyMemory: a KV-cache memory hierarchy for LLM inference that reaches up to satellites in low Earth orbit."""

__version__ = "0.1.0"
