"""The native helper's functions in Python: what runs where nothing was compiled, and what the tests judge C by."""
