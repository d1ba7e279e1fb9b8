"""What `skymemory demo` runs: each act one file."""
