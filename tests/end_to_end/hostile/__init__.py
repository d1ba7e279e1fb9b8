"""Causes of trouble for `skymemory route`, and what other clients get beside each: engines, clients, causes, trials."""
