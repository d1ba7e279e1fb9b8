"""What the demo runs unless it is told otherwise."""

DEMO_CODECS = ("raw", "quanto8", "hqq8")
QUICK_STRATEGIES = ("random", "round-robin", "least-load", "approximate", "least-ttft")
ROUTE_STRATEGIES = ("random", "round-robin", "least-load", "approximate", "precise", "least-ttft")
