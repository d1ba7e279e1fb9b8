"""Front ends of the router: an OpenAI-compatible HTTP proxy and Envoy's endpoint picker; engines' metrics and
events.
"""
