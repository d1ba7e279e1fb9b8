"""One tier's circuit breaker: a tier that fails or does not answer in time is skipped, and found again by itself.

Pure: time comes in as ``now_s``, and whoever owns it does the calls (and the locking).
"""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When to open and how often to probe."""

    failures: int = 3
    """Failures in a row that open it; an answer in between begins the count anew. One call that hangs opens it, too."""
    first_wait_s: float = 0.5
    last_wait_s: float = 30.0
    """Probes come so long after one another: the first wait, twice that, … up to the last."""
    probe_limit_s: float = 10.0
    """A probe not heard of for so long is taken for failed."""

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.first_wait_s <= self.last_wait_s or self.probe_limit_s <= 0:
            raise InvalidInput(f"a breaker needs failures >= 1 and 0 < first wait <= last wait, got {self}")


class TierBreaker:
    """``closed`` (all is well), ``open`` (skipped), or ``half-open`` (skipped, with one probe on its way)."""

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
        """A call was answered in time. While it is not closed only probes count: this answer may be an old one."""
        if self.closed:
            self._failures = 0
            self._on_trial = False
            self._wait_s = self._config.first_wait_s

    def failed(self, now_s: float) -> None:
        """A call failed or was not answered in time. After a probe's success a single one suffices."""
        if not self.closed:
            return
        self._failures += 1
        if self._failures >= self._config.failures or self._on_trial:
            self._open(now_s)

    def hung(self, now_s: float) -> None:
        """A call was not answered within the longest time that one may take: opens at once."""
        if self.closed:
            self._open(now_s)

    def probe_due(self, now_s: float) -> bool:
        """Whether the caller is to send a probe now; then it is half-open, and nobody else is."""
        if self.closed or now_s < self._until_s:
            return False
        if self.state == "half-open":  # the last probe was never heard of
            self._open(now_s)
            return False
        self.state = "half-open"
        self._until_s = now_s + self._config.probe_limit_s
        return True

    def probed(self, answered: bool, now_s: float) -> None:
        """How the probe ended. Of a probe already given up nothing is believed but bad news."""
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
