"""Several stores as one, each behind threads, a deadline and a circuit breaker of its own."""
