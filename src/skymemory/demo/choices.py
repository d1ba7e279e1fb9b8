"""Defaults of the demos."""

DEMO_CODECS = ("raw", "quanto8", "hqq8")
QUICK_STRATEGIES = ("random", "round-robin", "least-load", "approximate", "least-ttft")
ROUTE_STRATEGIES = ("random", "round-robin", "least-load", "approximate", "precise", "least-ttft")
