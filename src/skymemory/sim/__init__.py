"""What is computed rather than flown: the latency model of the paper, loading, and routing to simulated servers."""
