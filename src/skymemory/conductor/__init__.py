"""Request routing: state of servers and their caches, routing strategies, schedulers and admission rules.

Pure: time comes in as ``now_s``, nothing here does I/O. The simulator, the HTTP proxy and Envoy's endpoint picker
use the same ``picker.Picker``.
"""
