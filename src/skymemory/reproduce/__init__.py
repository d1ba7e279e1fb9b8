"""`skymemory reproduce`: figures of the Cake and Mooncake papers, computed by our code."""
