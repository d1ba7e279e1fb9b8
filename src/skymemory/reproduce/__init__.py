"""What `skymemory reproduce` runs: the figures of papers, simulated."""
