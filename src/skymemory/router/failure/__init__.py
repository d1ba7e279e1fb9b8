"""Whose fault a failure is, what is sent again, which servers get no requests. Pure: ``now_s`` in, decisions out."""
