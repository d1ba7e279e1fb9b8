"""Where a request should go: what is known of servers and of their caches, and strategies that choose.

Pure: time comes in as ``now_s``, nothing here does I/O. The simulator, the HTTP proxy and Envoy's endpoint picker
hold the same ``picker.Picker``.
"""
