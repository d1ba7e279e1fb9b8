"""One store at one tier, in its two phases. What the tier did not confirm, though another did, is in doubt there."""

from __future__ import annotations

from collections.abc import Sequence

from skymemory.cache.tier import Tier
from skymemory.cache.tier_workers import Call
from skymemory.errors import ValueTooLarge
from skymemory.store.base import Buffer, Places, StoreTicket

Items = Sequence[tuple[bytes, Buffer]]
_Tickets = list[tuple[StoreTicket, list[int]]]
_TooLarge = dict[int, ValueTooLarge]
_Prepared = tuple[_Tickets, _TooLarge, list[int]]


class TierWrite:
    """``items`` on their way into ``tier``. ``too_large`` are the positions of those that could never fit it."""

    def __init__(self, tier: Tier, items: Items, places: Places) -> None:
        self.tier = tier
        self.items = items
        self._places = places or (None,) * len(items)
        self.answered = False
        """Whether the tier could be asked for room at all."""
        self.certain = False
        """Whether what ``end`` gave is the tier's own word on all of ``items``."""
        self.too_large: _TooLarge = {}
        self._tickets: _Tickets = []
        self._left: list[int] = []
        """Positions that the tier has not been asked for room for, because a larger one was too large."""
        self._call: Call[list[list[bool]]] | None = None

    @classmethod
    def prepare(cls, tier: Tier, items: Items, places: Places = ()) -> TierWrite:
        """Set room aside for those of ``items`` that are not in doubt there. Where the largest of them is too large
        nothing is set aside or evicted yet (``prepare_rest`` does that).
        """
        self = cls(tier, items, places)
        keys = [key for key, _ in items]
        wanted = [at for at, key in enumerate(keys) if key not in tier.doubts]
        if not wanted or not tier.usable(keys):
            return self
        told = tier.ask(lambda: _prepare(tier, items, self._places, wanted))
        if told is not None:
            self.answered = True
            self._tickets, self.too_large, self._left = told
        return self

    def prepare_rest(self) -> None:
        """Where one item was too large for the tier, room for the others."""
        left, self._left = self._left, []
        if left and (told := self.tier.ask(lambda: _prepare_rest(self.tier, self.items, self._places, left))):
            tickets, too_large = told
            self._tickets += tickets
            self.too_large |= too_large

    def start(self) -> None:
        tickets, store = self._tickets, self.tier.store
        if tickets and self.tier.usable(()):
            self._call = self.tier.start(lambda: [store.complete_store(ticket) for ticket, _ in tickets])

    def end(self) -> list[bool]:
        """Per item: stored there and acknowledged in time. Of a tier that failed nothing is known."""
        done = [False] * len(self.items)
        if self._call is None:
            self.certain = self.answered and len(self.too_large) == len(self.items)
            if self._tickets:
                self.tier.doubts.add(key for key, _ in self.items)
            return done
        keys = [key for key, _ in self.items]
        size_bytes = sum(memoryview(value).nbytes for _, value in self.items)
        until_s = self._call.started_s + self.tier.deadline_s("store", size_bytes)
        told = self.tier.end(self._call, until_s, changes=keys, kind="store", moved=lambda stored: size_bytes)
        if told is None:
            self.tier.doubts.add(keys)
            return done
        self.certain = len(self.too_large) + sum(len(positions) for _, positions in self._tickets) == len(self.items)
        for (_, positions), outcomes in zip(self._tickets, told, strict=True):
            for at, ok in zip(positions, outcomes, strict=False):
                done[at] = bool(ok) and keys[at] not in self.tier.doubts
        self.tier.counters.add("tier_stored_total", sum(done), self.tier.name)
        return done


def _prepare(tier: Tier, items: Items, places: Places, wanted: list[int]) -> _Prepared:
    try:
        ticket = tier.store.prepare_store([items[at] for at in wanted], [places[at] for at in wanted])
        return [(ticket, wanted)], {}, []
    except ValueTooLarge as error:
        largest = _largest(items, wanted)
        return [], {largest: error}, [at for at in wanted if at != largest]


def _prepare_rest(tier: Tier, items: Items, places: Places, left: list[int]) -> tuple[_Tickets, _TooLarge]:
    """Without the largest, as often as it is too large."""
    too_large: _TooLarge = {}
    while left:
        tickets, more, left = _prepare(tier, items, places, left)
        too_large |= more
        if tickets:
            return tickets, too_large
    return [], too_large


def _largest(items: Items, wanted: list[int]) -> int:
    return max(wanted, key=lambda at: memoryview(items[at][1]).nbytes)


def write(tier: Tier, items: Items, places: Places = ()) -> tuple[list[bool], bool]:
    """Both phases: per item whether it was stored, and whether all of that is certain (``TierWrite.certain``)."""
    one = TierWrite.prepare(tier, items, places)
    one.prepare_rest()
    one.start()
    return one.end(), one.certain
