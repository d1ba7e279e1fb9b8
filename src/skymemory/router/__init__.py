"""Front ends of the router (HTTP proxy, Envoy's endpoint picker) and its input from engines."""
