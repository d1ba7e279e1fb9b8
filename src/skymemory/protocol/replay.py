"""Which authenticated commands have been here before: a bounded window per sender.

Every command that a sender transmits has a number of its own, greater than all before: its time in microseconds, then
the 14 bits of its sequence count. A retransmission is made anew, so it has a new number and passes; the very bytes of
an earlier packet do not, whoever sends them again.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_SKEW_S = 30.0
"""A command whose time differs more than this from the receiver's is refused: so old ones need not be remembered."""
REMEMBERED = 2048
"""Numbers remembered of one sender, in each of two generations; what is older than all of them is refused."""
MAX_SENDERS = 256
"""Senders of whom so much is remembered; of others that were here before only the newest number."""
MAX_FORGOTTEN = 4096
"""Those others. They are kept for as long as the check of its time would let a copy of theirs pass: who is refused for
what another has sent would be refused without a reason that he could know, wherever his clock is behind by a little.
"""
START_GRACE_S = 1.0
"""A receiver that starts takes what was made so shortly before: its neighbours start when it does, and greet it."""
_SEQUENCE_BITS = 14
_PASSED_US = int(2 * MAX_SKEW_S * 1e6)
"""A number that much below another that was taken is too old by any receiver's clock: the other is 30 s ahead at most.
"""

Sender = tuple[int, int, int]
"""Key id, ground host, and where that is 0 the packed address of a satellite."""


def stamp(time_us: int, sequence_count: int) -> int:
    """The number of a command: unique per sender, ascending."""
    return time_us << _SEQUENCE_BITS | sequence_count


class _Seen:
    """What one sender has sent: everything up to ``floor`` counts as seen."""

    __slots__ = ("earlier", "floor", "newest", "recent")

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.newest = floor
        self.recent: set[int] = set()
        self.earlier: set[int] = set()

    def first(self, number: int) -> bool:
        if number <= self.floor or number in self.recent or number in self.earlier:
            return False
        self.recent.add(number)
        self._took(number)
        return True

    def all_first(self, numbers: list[int]) -> bool:
        distinct = set(numbers)
        new = len(distinct) == len(numbers) > 0 and min(numbers) > self.floor
        if not (new and distinct.isdisjoint(self.recent) and distinct.isdisjoint(self.earlier)):
            return False
        self.recent |= distinct
        self._took(max(numbers))
        return True

    def _took(self, newest: int) -> None:
        self.newest = max(self.newest, newest)
        if len(self.recent) >= REMEMBERED:
            if self.earlier:
                self.floor = max(self.floor, max(self.earlier))
            self.earlier, self.recent = self.recent, set()


class ReplayWindow:
    """One receiver's memory. It knows nothing from before ``start_us`` and refuses what was made before then."""

    def __init__(self, start_us: int) -> None:
        self._floor = stamp(start_us, 0) - 1
        self._senders: OrderedDict[Sender, _Seen] = OrderedDict()
        self._forgotten: OrderedDict[Sender, int] = OrderedDict()
        """The newest numbers of senders that were not heard lately, the first to be forgotten first."""

    def first(self, sender: Sender, number: int) -> bool:
        """Whether this command, authentic and recent, is here for the first time; it is remembered."""
        return self._seen(sender).first(number)

    def all_first(self, sender: Sender, numbers: list[int]) -> bool:
        """Whether all these are here for the first time, and differ: then they are remembered; if not, none is."""
        return self._seen(sender).all_first(numbers)

    def _seen(self, sender: Sender) -> _Seen:
        seen = self._senders.get(sender)
        if seen is None:
            seen = self._senders[sender] = _Seen(max(self._floor, self._forgotten.pop(sender, self._floor)))
            if len(self._senders) > MAX_SENDERS:
                self._forget(*self._senders.popitem(last=False))
        else:
            self._senders.move_to_end(sender)
        return seen

    def _forget(self, sender: Sender, seen: _Seen) -> None:
        """Of this one, all up to its newest number is refused from now on; of all where there are too many."""
        self._forgotten[sender] = seen.newest
        passed = seen.newest - stamp(_PASSED_US, 0)
        while len(self._forgotten) > MAX_FORGOTTEN or next(iter(self._forgotten.values())) < passed:
            self._floor = max(self._floor, self._forgotten.popitem(last=False)[1])
