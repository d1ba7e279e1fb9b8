"""Number of connections that the limit of open files allows."""

from __future__ import annotations

import contextlib

SPARE_FILES = 40
"""Files for listeners, libraries, log, event loop."""
FILES_PER_BACKEND = 4
"""Files for checks, metrics, model lists and KV events of a server."""
LEAST_CONNECTIONS = 8
MAX_CONNECTIONS = 8192


def client_connections(files: int | None, backends: int, per_request: int = 1) -> int:
    """Return the client connections that leave ``per_request`` server connections each."""
    if files is None:
        return MAX_CONNECTIONS
    available = files - SPARE_FILES - FILES_PER_BACKEND * backends
    return max(LEAST_CONNECTIONS, min(MAX_CONNECTIONS, available // (1 + per_request)))


def open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Raise the limit of open files: many systems allow 1,024."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # some systems report "unlimited" and refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
