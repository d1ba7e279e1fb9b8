"""Asking every satellite one thing without adding to the trouble of a busy host; no I/O, no clock: see ``control``.

A thousand questions at once, each repeated within a second, are what keeps an overloaded host from answering; and an
answer that comes after that second is thrown away. So few questions are under way at a time, an unanswered one is
repeated ever more seldom where many of its host are unanswered, any answer counts whenever it comes, and a host is
waited for as long as it makes progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest

from skymemory.constellation.torus import SatelliteId

WINDOW = 64
"""Questions under way. One that is overdue (``OVERDUE_S``) does not count: the dead would hold up the living."""
OVERDUE_S = 0.25
"""Beside the round trip. After it a question is repeated, and then each time after twice as long, while its host gets
more than ``REPEATED_PER_S``: where packets are lost, not late, a few silent satellites cost nothing to ask again.
"""
REPEATED_PER_S = 10.0
"""Repeated questions to one host: fewer than the most overloaded one that still makes progress can answer."""


class Survey:
    """Whom to ask when, and how long to wait for whom. ``hosts``: the satellites to be asked, by host.

    A host is given up when none of its satellites has answered for ``patience_s``, it has not been ``busy`` meanwhile,
    and each has been asked; at the latest ``most_s`` after it was first asked.
    """

    def __init__(
        self, hosts: Mapping[str, Sequence[SatelliteId]], patience_s: float, most_s: float, round_trip_s: float = 0.0
    ) -> None:
        self._host_of = {satellite: host for host, satellites in hosts.items() for satellite in satellites}
        self._open = {host: set(satellites) for host, satellites in hosts.items() if satellites}
        # One of each host in turn: they answer side by side.
        turns = chain.from_iterable(zip_longest(*hosts.values()))
        self._unasked = [satellite for satellite in turns if satellite is not None][::-1]
        self._patience_s, self._most_s = patience_s + round_trip_s, most_s + round_trip_s
        self._overdue_s = OVERDUE_S + round_trip_s
        self._fresh: dict[SatelliteId, float] = {}
        """Questions under way, by when they are overdue, in that order."""
        self._waits_s: dict[SatelliteId, float] = {}
        self._overdue: dict[SatelliteId, float] = {}
        """When those were asked last whose questions are overdue."""
        self._began_s: dict[str, float] = {}
        self._progress_s: dict[str, float] = {}

    @property
    def waiting(self) -> dict[str, int]:
        """How many satellites of each host have not answered, of the hosts that are still waited for."""
        return {host: len(satellites) for host, satellites in self._open.items()}

    def to_ask(self, now_s: float) -> list[SatelliteId]:
        """Ask these now; empty ``waiting`` ends the survey."""
        self._let_go(now_s)
        again = sorted((at_s, satellite) for at_s, satellite in self._again_s() if at_s <= now_s)
        asked: list[SatelliteId] = []
        while len(self._fresh) < WINDOW and (self._unasked or again):
            # Those who had no turn yet come first.
            satellite = self._unasked.pop() if self._unasked else again.pop(0)[1]
            if satellite in self._open.get(self._host_of[satellite], ()):
                self._ask(satellite, now_s)
                asked.append(satellite)
        return asked

    def _ask(self, satellite: SatelliteId, now_s: float) -> None:
        host = self._host_of[satellite]
        self._overdue.pop(satellite, None)
        self._fresh[satellite] = now_s + self._overdue_s
        wait_s = self._waits_s.get(satellite)
        if wait_s is None:  # its host's time begins with the last of its satellites
            self._began_s.setdefault(host, now_s)
            self._progress_s[host] = now_s
            self._waits_s[satellite] = self._overdue_s
        else:
            self._waits_s[satellite] = 2 * wait_s

    def _seldom_s(self, host: str) -> float:
        """The longest wait between two questions to one of its satellites, as many as are unanswered now."""
        return max(self._overdue_s, len(self._open[host]) / REPEATED_PER_S)

    def _again_s(self) -> Iterator[tuple[float, SatelliteId]]:
        """When to ask those again whose questions are overdue. A wait shrinks as others of the host answer: the last
        ones would otherwise wait for their turn among many until the host's patience is over.
        """
        seldom_s = {host: self._seldom_s(host) for host in self._open}
        for satellite, asked_s in self._overdue.items():
            yield asked_s + min(self._waits_s[satellite], seldom_s[self._host_of[satellite]]), satellite

    def answered(self, satellite: SatelliteId, now_s: float) -> None:
        """It has, however late; a second answer of one that was asked twice is progress of its host, too."""
        host = self._host_of[satellite]
        self._fresh.pop(satellite, None)
        self._overdue.pop(satellite, None)
        waiting = self._open.get(host)
        if waiting is not None:
            waiting.discard(satellite)
            self._progress_s[host] = now_s
            if not waiting:
                del self._open[host]

    def busy(self, hosts: Iterable[str], now_s: float) -> None:
        """These processes want the processor: their silence says nothing yet."""
        for host in hosts:
            if host in self._open:
                self._progress_s[host] = max(now_s, self._progress_s.get(host, now_s))

    def _let_go(self, now_s: float) -> None:
        """What is overdue, and the hosts that are given up."""
        for satellite, until_s in list(self._fresh.items()):
            if until_s <= now_s:
                del self._fresh[satellite]
                self._overdue[satellite] = until_s - self._overdue_s
        unasked = {self._host_of[satellite] for satellite in self._unasked}
        for host in list(self._open):
            silent = host not in unasked and now_s >= self._progress_s.get(host, now_s) + self._patience_s
            if silent or now_s >= self._began_s.get(host, now_s) + self._most_s:
                for satellite in self._open.pop(host):
                    self._fresh.pop(satellite, None)
                    self._overdue.pop(satellite, None)

    def next_s(self, now_s: float) -> float:
        """When to call ``to_ask`` again at the latest."""
        ends = (self._progress_s.get(host, now_s) + self._patience_s for host in self._open)
        again = (at_s for at_s, _ in self._again_s()) if len(self._fresh) < WINDOW else ()
        return min([*self._fresh.values(), *again, *ends], default=now_s)
