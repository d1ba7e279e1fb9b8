"""A small engine with the OpenAI protocol, and a client of any such endpoint."""
