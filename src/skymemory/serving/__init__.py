"""Above the engine and the router: a small engine behind the OpenAI protocol, and a client of any."""
