"""Demos of the `skymemory demo` command."""
