"""No server gets much more than its share of requests, however good its cache is for them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class GuardSettings:
    limit: float = 4.0
    """Times the mean of requests per server that one server may get; infinite: no guard."""
    window_s: float = 60.0
    requests: int = 80
    """Runs of fewer requests are no concern: with few, a mean means nothing."""
    mean: float = 5.0
    """Nor are runs of less than this per server. Over 16 servers it outweighs ``requests``: of 80 requests to 64
    servers each could get two, and every conversation would wander."""

    def __post_init__(self) -> None:
        if not (self.limit >= 1 and self.window_s > 0 and self.requests >= 1 and self.mean >= 0):
            raise InvalidInput(
                f"a guard of {self.limit} × the mean over {self.window_s} s and {self.requests} requests;"
                " expected a limit of 1 or more, a window over 0 s, and 1 request or more"
            )


@dataclass(slots=True)
class _Bar:
    """The sliding maximum over a server's requests, for one number of servers."""

    highest: deque[tuple[float, float]] = field(default_factory=deque)
    """When a request was sent, and its bar; of those that a later one outweighs only the later is kept."""
    judged: int = 0
    """The server's requests before this number have been through it."""


@dataclass(slots=True)
class _Share:
    """One server's requests in the window."""

    sent: deque[tuple[float, int]] = field(default_factory=deque)
    """When, and how many requests to all servers came before it."""
    first: int = 0
    """The number of ``sent[0]`` among the server's own requests."""
    bars: dict[int, _Bar] = field(default_factory=dict)


class ShareGuard:
    """Says whether a server may get the next request.

    The rule holds for every run of consecutive requests that fits into ``window_s`` and has at least the requests of
    ``GuardSettings``: of ``n`` servers none has more than ``limit / n`` of the run. It holds even if traffic stops
    after any of them, so no window can be found later in which it is broken; and it is exact: a server is over only if
    its next request would end such a run, or a shorter one that the requests missing to its length could not mend.

    How: a run from a server's own request number ``j`` to its next one, number ``k``, has ``k − j + 1`` of its requests
    among ``q − p + 1`` of all, and is too many if ``p − c·j > q + 1 − c·(k + 1)``, with ``c = n / limit``. The greatest
    left side is a sliding maximum over ``j``, so that a request costs constant time, amortised.
    """

    def __init__(self, settings: GuardSettings | None = None) -> None:
        self.settings = settings or GuardSettings()
        self._count = 0
        self._shares: dict[int, _Share] = {}

    def over(self, slot: int, servers: int, now_s: float) -> bool:
        """Whether the server has had its share, as one of so many. Changes nothing that a caller can see."""
        share = self._shares.get(slot)
        limit = self.settings.limit
        if share is None or limit >= servers:
            return False
        free = math.floor(limit * max(self.settings.requests / servers, self.settings.mean) + 1e-9)
        if len(share.sent) < free:
            return False
        bar = share.bars.get(servers)
        if bar is None:
            if len(share.bars) >= 4:
                share.bars.clear()
            bar = share.bars[servers] = _Bar()
        per_request = servers / limit
        upcoming = share.first + len(share.sent)
        highest = bar.highest
        bar.judged = max(bar.judged, share.first)
        while bar.judged < upcoming + 1 - free:
            at_s, before = share.sent[bar.judged - share.first]
            height = before - per_request * bar.judged
            while highest and highest[-1][1] <= height:
                highest.pop()
            highest.append((at_s, height))
            bar.judged += 1
        while highest and highest[0][0] <= now_s - self.settings.window_s:
            highest.popleft()
        return bool(highest) and highest[0][1] > self._count + 1 - per_request * (upcoming + 1) + 1e-6

    def sent(self, slot: int, now_s: float) -> None:
        """A request goes to ``slot``."""
        share = self._shares.setdefault(slot, _Share())
        share.sent.append((now_s, self._count))
        self._count += 1
        while share.sent[0][0] <= now_s - self.settings.window_s:
            share.sent.popleft()
            share.first += 1

    def forget(self, slot: int) -> None:
        self._shares.pop(slot, None)
