"""Python twin of the native helper: used if C was not compiled, and the reference of the tests."""
