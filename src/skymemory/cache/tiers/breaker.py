"""Circuit breaker of one tier: opens when it fails or hangs, closes again after a successful probe.

Pure: time comes in as ``now_s``; the owner makes the calls and does the locking.
"""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When to open and how often to probe."""

    failures: int = 3
    """Consecutive failures that open it. A single call that hangs opens it, too."""
    first_wait_s: float = 0.5
    last_wait_s: float = 30.0
    """Wait before a probe: ``first_wait_s``, doubled after each failed probe up to ``last_wait_s``."""
    probe_limit_s: float = 10.0
    """A probe without an answer for this long has failed."""

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.first_wait_s <= self.last_wait_s or self.probe_limit_s <= 0:
            raise InvalidInput(
                f"a circuit breaker needs failures >= 1, 0 < first_wait <= last_wait and probe_limit > 0, got {self}"
            )


class TierBreaker:
    """``closed`` (calls pass), ``open`` (skipped) or ``half-open`` (skipped, one probe under way)."""

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._failures = 0
        self._wait_s = self._config.first_wait_s
        self._until_s = 0.0
        self._on_trial = False
        self.state = "closed"
        self.times_opened = 0

    @property
    def closed(self) -> bool:
        return self.state == "closed"

    def succeeded(self) -> None:
        """A call was answered in time. Ignored unless closed, as the call may be an old one: only probes close it."""
        if self.closed:
            self._failures = 0
            self._on_trial = False
            self._wait_s = self._config.first_wait_s

    def failed(self, now_s: float) -> None:
        """A call failed or was not answered in time. The first one after a successful probe opens it again."""
        if not self.closed:
            return
        self._failures += 1
        if self._failures >= self._config.failures or self._on_trial:
            self._open(now_s)

    def timed_out(self, now_s: float) -> None:
        """A call was not answered within the longest deadline: opens at once."""
        if self.closed:
            self._open(now_s)

    def probe_due(self, now_s: float) -> bool:
        """Whether the caller must send a probe now; if so, it is half-open until ``probed``."""
        if self.closed or now_s < self._until_s:
            return False
        if self.state == "half-open":  # the last probe was not answered
            self._open(now_s)
            return False
        self.state = "half-open"
        self._until_s = now_s + self._config.probe_limit_s
        return True

    def probed(self, answered: bool, now_s: float) -> None:
        """The outcome of a probe. A success is ignored if the probe was already given up."""
        if self.state != "half-open":
            return
        if not answered:
            self._open(now_s)
            return
        self.state = "closed"
        self._failures = 0
        self._on_trial = True

    def _open(self, now_s: float) -> None:
        self.times_opened += self.closed
        self.state = "open"
        self._until_s = now_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._config.last_wait_s)
