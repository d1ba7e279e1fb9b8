"""Whose fault a failure is, which requests are sent again, and which servers get no requests. Pure: ``now_s`` is an
argument.
"""
