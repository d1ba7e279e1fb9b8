"""Servers that would not take requests are left alone for a while. No I/O: it learns from requests that went by."""

from __future__ import annotations

from dataclasses import dataclass, field

from skymemory.conductor.fleet import Fleet


@dataclass(slots=True)
class Ejection:
    """After ``failures`` requests in a row that a server did not take it is unhealthy for ``rest_s``; then one more
    failure is enough. The last healthy server is never ejected: a doubtful server is better than none.
    """

    fleet: Fleet
    failures: int = 3
    rest_s: float = 10.0
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _back_at_s: dict[str, float] = field(default_factory=dict)

    def took(self, name: str) -> None:
        """It answered, whatever it said."""
        self._in_a_row.pop(name, None)

    def refused(self, name: str, now_s: float) -> bool:
        """It did not answer. True if it is ejected now."""
        server = self.fleet.servers.get(name)
        if server is None or not server.healthy:
            return False
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
        others = sum(other.takes_requests for other in self.fleet if other is not server)
        if self._in_a_row[name] < self.failures or not others:
            return False
        server.healthy = False
        self._back_at_s[name] = now_s + self.rest_s
        return True

    def review(self, now_s: float) -> None:
        """Bring back those whose rest is over."""
        if not self._back_at_s:
            return
        for name in [name for name, back_at_s in self._back_at_s.items() if back_at_s <= now_s]:
            del self._back_at_s[name]
            self._in_a_row[name] = self.failures - 1
            if name in self.fleet.servers:
                self.fleet.servers[name].healthy = True

    def forget(self, name: str) -> None:
        """The server left the fleet."""
        self._in_a_row.pop(name, None)
        self._back_at_s.pop(name, None)
