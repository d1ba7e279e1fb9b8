"""How many connections the process can have by its limit of open files."""

from __future__ import annotations

import contextlib

SPARE_FILES = 40
"""For the process itself: its listeners, libraries, log, event loop."""
FILES_PER_BACKEND = 4
"""For checks, metrics, model lists and KV events of one server."""
LEAST_CONNECTIONS = 8
MAX_CONNECTIONS = 8192
"""Of clients, however many files there are."""


def client_connections(files: int | None, backends: int, per_request: int = 1) -> int:
    """Clients' connections that leave each of their requests ``per_request`` connections to servers.

    Args:
        files: the limit of open files; None: there is none.
    """
    if files is None:
        return MAX_CONNECTIONS
    left = files - SPARE_FILES - FILES_PER_BACKEND * backends
    return max(LEAST_CONNECTIONS, min(MAX_CONNECTIONS, left // (1 + per_request)))


def open_files() -> int | None:
    """The present limit of open files; None: there is none."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Raise the limit of open files: a request takes two connections, and many systems allow 1,024 files."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # some systems report "unlimited" and refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
