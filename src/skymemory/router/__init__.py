"""The doors of the router: an OpenAI-compatible HTTP proxy, Envoy's endpoint picker, and what comes in from engines."""
