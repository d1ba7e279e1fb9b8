"""Demos of the `skymemory demo` command, one file per demo."""
