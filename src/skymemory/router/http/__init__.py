"""HTTP front end: OpenAI's API for several engines."""
