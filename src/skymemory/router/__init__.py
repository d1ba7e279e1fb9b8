"""Front ends of the router (an OpenAI-compatible HTTP proxy, Envoy's endpoint picker) and its input from engines."""
