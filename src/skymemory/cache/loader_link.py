"""What the loader has asked for and not got: how many bytes, in which order, and when they may be expected."""

from __future__ import annotations

from skymemory.cache.pace import Pace


class FetchQueue:
    """Fetches under way, served in the order in which they were asked for. ``max_bytes`` bounds them, but for one."""

    def __init__(self, pace: Pace, max_bytes: int) -> None:
        self._pace = pace
        self._max_bytes = max_bytes
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._head_since_s = 0.0
        self._from_idle: int | None = None  # the fetch that found the link idle

    def __contains__(self, index: int) -> bool:
        return index in self._sizes

    def indices(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def has_room(self, size_bytes: int) -> bool:
        """Whether one more of this size may be asked for; one always may."""
        return not self._sizes or self._bytes + size_bytes <= self._max_bytes

    def ask(self, index: int, size_bytes: int, now_s: float) -> None:
        if not self._sizes:
            self._head_since_s = now_s
            self._from_idle = index
        self._sizes[index] = size_bytes
        self._bytes += size_bytes

    def came(self, index: int, now_s: float) -> None:
        """The fetch is there: so much of the link's time has brought so many bytes."""
        from_idle = index == self._from_idle
        self._pace.load_took(self._drop(index), now_s - self._head_since_s, from_idle=from_idle)
        self._head_since_s = now_s

    def failed(self, index: int, now_s: float) -> int:
        """The fetch will not come; its bytes. The time it took brought nothing."""
        if index == self._head():
            self._pace.load_took(0, now_s - self._head_since_s)
        return self.cancel(index, now_s)

    def cancel(self, index: int, now_s: float) -> int:
        """Nobody waits for the fetch any more; its bytes."""
        if index == self._head():
            self._head_since_s = now_s  # else the oldest is as late as before
        return self._drop(index)

    def head_s(self, now_s: float) -> float:
        """Seconds until the oldest fetch is expected; negative if it is late; 0 on an idle link."""
        rate = self._pace.bytes_per_s
        if rate is None or not self._sizes:
            return 0.0
        latency_s = self._pace.latency_s if self._head() == self._from_idle else 0.0
        return self._head_since_s + latency_s + self._head_bytes() / rate - now_s

    def idle_after_s(self, more_bytes: int, now_s: float) -> float | None:
        """Seconds until all that was asked for and ``more_bytes`` asked for now are here; None if no rate is known.

        What is late is expected to be late as long again.
        """
        rate = self._pace.bytes_per_s
        if rate is None:
            return None
        asked_s = abs(self.head_s(now_s)) + (self._bytes - self._head_bytes()) / rate
        return max(asked_s, self._pace.latency_s) + more_bytes / rate if more_bytes else asked_s

    def here_after_s(self, index: int, now_s: float) -> float | None:
        """Seconds until a fetch under way, and all before it, are here; None if no rate is known."""
        rate = self._pace.bytes_per_s
        if rate is None:
            return None
        ahead = 0
        for asked, size in self._sizes.items():
            ahead += size
            if asked == index:
                break
        return abs(self.head_s(now_s)) + (ahead - self._head_bytes()) / rate

    def _head(self) -> int | None:
        return next(iter(self._sizes), None)

    def _head_bytes(self) -> int:
        return next(iter(self._sizes.values()), 0)

    def _drop(self, index: int) -> int:
        size = self._sizes.pop(index)
        self._bytes -= size
        return size
