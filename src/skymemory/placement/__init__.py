"""Placement of values on satellites: the layouts, the closed form that locates a server, and migration."""
