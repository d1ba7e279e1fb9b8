"""Reproduction of the figures of the Cake and Mooncake papers by our code (`skymemory reproduce`)."""
