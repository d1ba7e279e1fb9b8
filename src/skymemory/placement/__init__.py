"""Which satellite holds what: the layouts, the closed form that locates a server, and migration."""
