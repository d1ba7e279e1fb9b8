"""Circuit breaker for a dependency that may fail as a whole: a tier, or the constellation.

Pure: time comes in as ``now_s``; the owner makes calls, sends probes and locks.

States: ``closed`` (calls pass), ``open`` (they do not), ``half-open`` (they do not, and a probe is in flight).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skymemory.errors import InvalidInput
from skymemory.pacing import Backoff


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    failures: int = 3
    first_wait_s: float = 0.5
    last_wait_s: float = 30.0
    """Waits before probes, doubled after each failed probe."""
    probe_limit_s: float | None = 10.0
    """Time limit of a probe. None: probes are packets that nothing waits for."""

    def __post_init__(self) -> None:
        limit_s = 1.0 if self.probe_limit_s is None else self.probe_limit_s
        if self.failures < 1 or not 0 < self.first_wait_s <= self.last_wait_s or limit_s <= 0:
            raise InvalidInput(
                f"a circuit breaker needs failures >= 1, 0 < first_wait <= last_wait and probe_limit > 0, got {self}"
            )


class CircuitBreaker:
    """Circuit breaker with two ways to close. A tier's hanging calls may be answered long afterwards, so only a probe
    counts (``probed``). A satellite's packet was sent just now, so any counts (``answered``).
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._failures = self._failed_loads = 0
        self._waits = Backoff(self._config.first_wait_s, self._config.last_wait_s)
        self._until_s = 0.0
        self._on_trial = False
        self._loads_opened = False
        self.state = "closed"
        self.times_opened = 0

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    @property
    def next_probe_s(self) -> float:
        return math.inf if self.closed else self._until_s

    def succeeded(self, *, loaded: bool = True) -> None:
        """Record a timely answer, if closed. Without ``loaded`` (a lookup) failures of loads still count."""
        if self.closed:
            self._failures = 0
            if loaded:
                self._failed_loads = 0
            if loaded or not self._loads_opened:
                self._on_trial = False
                self._waits.failures = 0

    def failed(self, now_s: float, *, load: bool = False) -> None:
        """Record a failed or late call; the first after a successful probe reopens the breaker."""
        if not self.closed:
            return
        self._failures += 1
        self._failed_loads += load
        if max(self._failures, self._failed_loads) >= self._config.failures or self._on_trial:
            self._open(now_s)
            self._loads_opened = load

    def timed_out(self, now_s: float, *, probe_at_once: bool = False) -> None:
        """Open at once."""
        if self.closed:
            self._open(now_s)
            self._loads_opened = False
            if probe_at_once:
                self._until_s, self._waits.failures = now_s, 0

    def probe_due(self, now_s: float) -> bool:
        if self.closed or now_s < self._until_s:
            return False
        limit_s = self._config.probe_limit_s
        if limit_s is not None and self.state == "half-open":  # the last probe was not answered
            self._open(now_s)
            return False
        self.state = "half-open"
        if limit_s is None:
            self._until_s = now_s + self._waits.next_s()
        else:
            self._until_s = now_s + limit_s
        return True

    def probed(self, answered: bool, now_s: float) -> None:
        """Record a probe's result; a success after its limit is ignored."""
        if self.state != "half-open":
            return
        if not answered:
            self._open(now_s)
            return
        self.state = "closed"
        self._failures = self._failed_loads = 0
        self._on_trial = True

    def answered(self) -> bool:
        """Close; return True if it was not closed."""
        was_closed = self.closed
        self.state = "closed"
        self.succeeded()
        return not was_closed

    def _open(self, now_s: float) -> None:
        self.times_opened += self.closed
        self.state = "open"
        self._until_s = now_s + self._waits.next_s()
