"""Request routing: the state of servers and their caches, routing strategies, schedulers and admission rules.

The package does no I/O and reads no clock: callers pass the time as ``now_s``. The simulator, the HTTP proxy and
Envoy's endpoint picker share ``picker.Picker``.
"""
