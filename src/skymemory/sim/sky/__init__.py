"""Links with rates over real geometry: latency, its lower bound, the best setting, when loading beats computing."""
