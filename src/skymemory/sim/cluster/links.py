"""Links that are shared: who asks first is served first, and no byte goes twice.

A link carries ``bytes_per_s`` and nothing overtakes on it. A transfer takes all the links of its way at once: on each
it waits for what was asked of that link before, and it is done when the slowest of them has carried it, plus the way's
latency. So a slow link (to a satellite) does not hold up a fast one (a node's) that it feeds: each is charged its own
time, bytes over its own rate. The end of a transfer is known when it begins and never changes.

Rejected: fair sharing, where each newcomer moves the ends of all others. It is nearer to what networks do, but ends
that were told would have to be told anew; the bytes carried until any moment when all links are busy are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from skymemory.errors import InvalidInput


class Link:
    """One direction of one interface."""

    __slots__ = ("bytes_per_s", "carried_bytes", "free_s", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise InvalidInput(f"link {name!r} carries {bytes_per_s:g} B/s; a rate above 0 is needed")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        """When it has carried all that was asked of it."""
        self.carried_bytes = 0.0
        """All that was ever asked of it."""

    def queue_s(self, now_s: float) -> float:
        """How long a newcomer waits for its first byte."""
        return max(0.0, self.free_s - now_s)

    def take(self, size_bytes: float, now_s: float) -> float:
        """When ``size_bytes`` asked for now have passed."""
        self.free_s = max(self.free_s, now_s) + size_bytes / self.bytes_per_s
        self.carried_bytes += size_bytes
        return self.free_s


def transfer_s(way: Sequence[Link], size_bytes: float, now_s: float, latency_s: float = 0.0) -> float:
    """When ``size_bytes`` have passed all links of ``way``; nothing passes at once and without latency."""
    if size_bytes <= 0:
        return now_s
    return latency_s + max(link.take(size_bytes, now_s) for link in way)


def streamed_s(
    way: Sequence[Link], size_bytes: float, now_s: float, latency_s: float, over_s: float, parts: int
) -> float:
    """As ``transfer_s``, where the bytes come to be in ``parts`` equal parts, the last of them ``over_s`` from now.

    The links are charged with all of them now: what is asked for meanwhile waits behind the whole stream.
    """
    if size_bytes <= 0:
        return now_s + over_s
    last_s = now_s + over_s
    end_s = transfer_s(way, size_bytes, now_s)
    return latency_s + max(end_s, *(last_s + size_bytes / parts / link.bytes_per_s for link in way))
