"""How long a caller needs for what it asks a store for if the store does not come: what it asks for is worth no more.

Whoever can make a prompt's blocks itself says so around its calls; a store that waits for others (``cache.tier``) asks
here. It is a context of the calling thread, for it is true of a call whatever stores it passes on its way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WORTH_S: ContextVar[float | None] = ContextVar("worth_s", default=None)


def worth_s() -> float | None:
    """Seconds that the present caller needs without the store; None where nobody has said."""
    return _WORTH_S.get()


@contextmanager
def worth(seconds: float | None) -> Iterator[None]:
    """Within this, what is asked of a store could be had without it in ``seconds`` (None: not known)."""
    token = _WORTH_S.set(seconds)
    try:
        yield
    finally:
        _WORTH_S.reset(token)
