"""One store over the tiers: through all of them at once, or into the nearest with the others left to the mover."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Tier
from skymemory.cache.tiers.workers import Call
from skymemory.errors import ValueTooLarge
from skymemory.kv.block import Place
from skymemory.store.base import Buffer, Places, StoreTicket


class TieredWrite:
    """Room set aside for ``items``. Raises ValueTooLarge for one that fits none of the tiers that answer."""

    def __init__(
        self,
        items: Sequence[tuple[bytes, Buffer]],
        places: Places,
        tiers: Sequence[Tier],
        outbound: Outbound,
        write_back: bool,
    ) -> None:
        self._tiers = tiers
        self._outbound = outbound
        self._lower = tuple(range(1, len(tiers)))
        self._write_back = write_back and bool(self._lower)
        self._items: dict[bytes, Buffer] = dict(items)
        self._places: dict[bytes, Place | None] = {key: at for (key, _), at in zip(items, places, strict=True)}
        if self._write_back or not all(tier.settings.local for tier in tiers):
            # One copy for all threads and what is on its way: the caller's bytes are the caller's again after this.
            self._items = {key: bytes(value) for key, value in items}
        self._stored: dict[int, set[bytes]] = {tier.number: set() for tier in tiers}
        self._pending: dict[int, set[bytes]] = {tier.number: set() for tier in tiers}
        self._refused: dict[int, set[bytes]] = {tier.number: set() for tier in tiers}
        """By each tier's own word."""
        self._writes: list[TierWrite] = []
        if any(tier.doubts.full for tier in tiers):
            self._items = {}
            tiers[0].counters.add("writes_refused_in_doubt_total", len(items))
            return
        every = list(self._items.items())
        first = tiers[:1] if self._write_back else tiers
        self._writes = [self._prepare(tier, every) for tier in first]
        oversize = self._oversize(every) if self._write_back else []
        if oversize:
            self._writes += [self._prepare(tier, oversize) for tier in tiers[1:]]
        self._refuse_what_fits_nowhere()
        for write in self._writes:
            write.prepare_rest()
        if oversize and (more := [item for item in self._oversize(every) if item not in oversize]):
            for write in [self._prepare(tier, more) for tier in tiers[1:]]:
                write.prepare_rest()
                self._writes.append(write)

    def _oversize(self, every: Sequence[tuple[bytes, Buffer]]) -> list[tuple[bytes, Buffer]]:
        """Those that are known to be too large for the nearest tier."""
        return [every[place] for place in self._writes[0].too_large]

    def _prepare(self, tier: Tier, items: Sequence[tuple[bytes, Buffer]]) -> TierWrite:
        return TierWrite.prepare(tier, items, [self._places[key] for key, _ in items])

    def _refuse_what_fits_nowhere(self) -> None:
        """Before room is set aside in a tier that cannot take all. What fits nowhere is the largest, or nothing is."""
        answered = [write for write in self._writes if write.answered]
        for write in answered:
            for place, error in write.too_large.items():
                key = write.items[place][0]
                if all(_too_large_in(other, key) for other in answered):
                    raise error

    def complete(self) -> set[bytes]:
        """Keys stored in at least one tier. Whoever calls it holds the keys (``KeyGuard.changing``)."""
        self._run(self._writes)
        taken = set[bytes]().union(*self._stored.values())
        dirty: set[bytes] = set()
        if self._write_back:
            dirty = {key for key in self._stored[0] if self._leave_to_mover(key)}
            rest = [(key, value) for key, value in self._items.items() if key not in dirty]
            rest = [item for item in rest if not self._stored_below(item[0])]
            if rest:
                writes = [self._prepare(tier, rest) for tier in self._tiers[1:]]
                for write in writes:
                    write.prepare_rest()
                self._run(writes)
                taken = taken.union(*self._stored.values())
        for tier in self._tiers:
            missed = taken - self._stored[tier.number]
            missed -= dirty if tier.number else set()
            note_missed(tier, missed, self._places, self._pending[tier.number], self._refused[tier.number])
        self._outbound.discard(taken - dirty)
        return taken

    def _leave_to_mover(self, key: bytes) -> bool:
        return self._outbound.add(Moving(key, bytes(self._items[key]), self._lower, True, self._places[key]))

    def _stored_below(self, key: bytes) -> bool:
        return any(key in self._stored[number] for number in self._lower)

    def _run(self, writes: Iterable[TierWrite]) -> None:
        """At once; the local ones last, for they run in this thread."""
        ordered = sorted(writes, key=lambda write: write.tier.settings.local)
        for write in ordered:
            write.start()
        for write in ordered:
            done = write.end()
            number, keys = write.tier.number, [key for key, _ in write.items]
            self._stored[number].update(key for key, ok in zip(keys, done, strict=True) if ok)
            self._pending[number].update(write.pending)
            self._refused[number].update(write.refused)


def _too_large_in(write: TierWrite, key: bytes) -> bool:
    return any(write.items[place][0] == key for place in write.too_large)


# One store at one tier, in its two phases.
#
# What comes of a call that was given up is not known. A block is named by its content, so that any copy of it is as
# good
# as another; but a value without a place may be an older one of its key, and is in doubt there until the call has
# landed
# and stored it.


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
            at
            for at, key in enumerate(keys)
            if not (tier.doubts.unsettled(key) if self._places[at] is None else key in tier.doubts)
        ]
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
            self._call,
            until_s,
            changes=[keys[at] for at in sent],
            outdates=changing,
            came_right=came_right,
            kind="store",
            moved=lambda stored: size_bytes,
        )
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
