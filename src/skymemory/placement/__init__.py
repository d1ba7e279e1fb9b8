"""Placement of values on satellites: layouts, location, migration."""
