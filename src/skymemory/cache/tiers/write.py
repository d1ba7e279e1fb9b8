"""One store at one tier, in its two phases.

What comes of a call that was given up is not known. A block is named by its content, so that any copy of it is as good
as another; but a value without a place may be an older one of its key, and is in doubt there until the call has landed
and stored it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skymemory.cache.tier import Tier
from skymemory.cache.tier_workers import Call
from skymemory.errors import ValueTooLarge
from skymemory.kv.block import Place
from skymemory.store.base import Buffer, Places, StoreTicket

Items = Sequence[tuple[bytes, Buffer]]
_Tickets = list[tuple[StoreTicket, list[int]]]
_TooLarge = dict[int, ValueTooLarge]
_Prepared = tuple[_Tickets, _TooLarge, list[int]]


class TierWrite:
    """``items`` on their way into ``tier``. ``too_large`` are the positions of those that could never fit it.

    A thread may go on reading them when nobody waits for it any more: a tier with threads is given ``bytes``, which
    nobody changes. ``copies``: they are what is elsewhere already, so that a tier that does not take them has nothing
    outdated.
    """

    def __init__(self, tier: Tier, items: Items, places: Places, copies: bool = False) -> None:
        self.tier = tier
        self.items = items
        self._places = places or (None,) * len(items)
        self._copies = copies
        self.answered = False
        """Whether the tier could be asked for room at all."""
        self.certain = False
        """Whether what ``end`` gave is the tier's own word on all of ``items``."""
        self.too_large: _TooLarge = {}
        self._tickets: _Tickets = []
        self._left: list[int] = []
        """Positions that the tier has not been asked for room for, because a larger one was too large."""
        self._call: Call[list[list[bool]]] | None = None
        self.given_up = False

    @classmethod
    def prepare(cls, tier: Tier, items: Items, places: Places = (), copies: bool = False) -> TierWrite:
        """Set room aside for those of ``items`` that are not in doubt there. Where the largest of them is too large
        nothing is set aside or evicted yet (``prepare_rest`` does that).
        """
        self = cls(tier, items, places, copies)
        keys = [key for key, _ in items]
        wanted = [
            at for at, key in enumerate(keys)
            if not (tier.doubts.unsettled(key) if self._places[at] is None else key in tier.doubts)
        ]  # fmt: skip
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
            return done
        keys = [key for key, _ in self.items]
        sent = [at for _, positions in self._tickets for at in positions]
        changing = [keys[at] for at in sent if self._places[at] is None]
        size_bytes = sum(memoryview(value).nbytes for _, value in self.items)
        until_s = self._call.started_s + self.tier.deadline_s("store", size_bytes)

        def came_right(told: list[list[bool]] | None) -> list[bytes]:
            if self._copies:
                return changing
            return [keys[at] for at in self._stored(told or []) if self._places[at] is None]

        told = self.tier.end(
            self._call, until_s, changes=[keys[at] for at in sent], outdates=changing, came_right=came_right,
            kind="store", moved=lambda stored: size_bytes,
        )  # fmt: skip
        if told is None:
            self.given_up = self._call.given_up
            if not self.given_up and not self._copies:
                self.tier.doubts.add(changing)
            return done
        self.certain = len(self.too_large) + len(sent) == len(self.items)
        for at in self._stored(told):
            done[at] = True
        self.tier.counters.add("tier_stored_total", sum(done), self.tier.name)
        return done

    def _stored(self, told: list[list[bool]]) -> list[int]:
        """The positions of what the tier says it has stored."""
        return [
            at
            for (_, positions), outcomes in zip(self._tickets, told, strict=False)
            for at, ok in zip(positions, outcomes, strict=False)
            if ok
        ]

    @property
    def refused(self) -> set[bytes]:
        """What the tier answered for, where it was not stored: it would not have it."""
        if not self.certain:
            return set()
        unanswered = frozenset[bytes]().union(*(ticket.unanswered for ticket, _ in self._tickets))
        return {key for key, _ in self.items if key not in unanswered}

    @property
    def pending(self) -> set[bytes]:
        """What may still land: of its doubts it is known when they end."""
        if not self.given_up:
            return set()
        return {self.items[at][0] for _, positions in self._tickets for at in positions}


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


def write(tier: Tier, items: Items, places: Places = (), copies: bool = False) -> tuple[list[bool], TierWrite]:
    """Both phases: per item whether it was stored, and the write, which knows how certain that is."""
    one = TierWrite.prepare(tier, items, places, copies)
    one.prepare_rest()
    one.start()
    return one.end(), one


def note_missed(
    tier: Tier, missed: set[bytes], places: Mapping[bytes, Place | None], pending: set[bytes], refused: set[bytes]
) -> None:
    """``missed`` are stored elsewhere and, as far as is known, not in ``tier``. A value that may change is in doubt
    there, unless its put is ``pending`` and says so itself; a block is owed to it, unless the tier ``refused`` it.
    """
    tier.doubts.add(key for key in missed if places[key] is None and key not in pending)
    owed = {key: place for key in missed - refused if (place := places[key]) is not None}
    if tier.number:  # what the nearest lacks comes back to it when it is read
        tier.owed.add({key: owed[key] for key in places if key in owed})  # in the order of their chain
