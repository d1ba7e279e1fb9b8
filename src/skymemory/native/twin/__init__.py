"""The native helper in Python: used where C was not compiled, and the reference of the tests."""
