"""Python twin of the native helper: used without a compiler, and the reference of the tests."""
