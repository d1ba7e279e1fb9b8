"""Store operation over all tiers: write-through to all, or write-back to the nearest now and others later.

A given-up call's outcome is unknown. A block's copies are all good. A value without a place may replace an older value:
its key is dirty in that tier until the late call has stored it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skymemory.cache.tiers.outbound import Moving, Outbound
from skymemory.cache.tiers.tier import Tier
from skymemory.cache.tiers.workers import WorkerCall
from skymemory.errors import ValueTooLarge
from skymemory.kv.block import Place
from skymemory.store.base import Buffer, Places, StoreTicket

Items = Sequence[tuple[bytes, Buffer]]
_Tickets = list[tuple[StoreTicket, list[int]]]
_TooLarge = dict[int, ValueTooLarge]
_Prepared = tuple[_Tickets, _TooLarge, list[int]]


class TieredWrite:
    """Room reserved for ``items``. Raises ValueTooLarge for an item that fits no answering tier."""

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
            # One copy for all threads and the outbound queue: the caller may reuse its buffers when the call returns.
            self._items = {key: bytes(value) for key, value in items}
        self._stored: dict[int, set[bytes]] = {tier.number: set() for tier in tiers}  # keys by tier number
        self._pending: dict[int, set[bytes]] = {tier.number: set() for tier in tiers}
        self._refused: dict[int, set[bytes]] = {tier.number: set() for tier in tiers}
        self.reason = ""
        self._writes: list[TierWrite] = []
        if any(tier.dirty_keys.full for tier in tiers):
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
        return [every[place] for place in self._writes[0].too_large]

    def _prepare(self, tier: Tier, items: Sequence[tuple[bytes, Buffer]]) -> TierWrite:
        return TierWrite.prepare(tier, items, [self._places[key] for key, _ in items])

    def _refuse_what_fits_nowhere(self) -> None:
        answered = [write for write in self._writes if write.answered]
        for write in answered:
            for place, error in write.too_large.items():
                key = write.items[place][0]
                if all(_too_large_in(other, key) for other in answered):
                    raise error

    def complete(self) -> set[bytes]:
        """Return the keys stored in any tier. The caller holds the keys (``KeyLocks.exclusive``)."""
        self._run(self._writes)
        stored = set[bytes]().union(*self._stored.values())
        dirty: set[bytes] = set()
        if self._write_back:
            dirty = {key for key in self._stored[0] if self._leave_to_mover(key)}
            remaining = [(key, value) for key, value in self._items.items() if key not in dirty]
            remaining = [item for item in remaining if not self._stored_below(item[0])]
            if remaining:
                writes = [self._prepare(tier, remaining) for tier in self._tiers[1:]]
                for write in writes:
                    write.prepare_rest()
                self._run(writes)
                stored = stored.union(*self._stored.values())
        for tier in self._tiers:
            missed = stored - self._stored[tier.number]
            missed -= dirty if tier.number else set()
            note_missed(tier, missed, self._places, self._pending[tier.number], self._refused[tier.number])
        self._outbound.discard(stored - dirty)
        return stored

    def _leave_to_mover(self, key: bytes) -> bool:
        return self._outbound.add(Moving(key, bytes(self._items[key]), self._lower, True, self._places[key]))

    def _stored_below(self, key: bytes) -> bool:
        return any(key in self._stored[number] for number in self._lower)

    def _run(self, writes: Iterable[TierWrite]) -> None:
        """Run concurrently; local writes, in this thread, start last."""
        ordered = sorted(writes, key=lambda write: write.tier.settings.local)
        for write in ordered:
            write.start()
        for write in ordered:
            done = write.end()
            number, keys = write.tier.number, [key for key, _ in write.items]
            self._stored[number].update(key for key, ok in zip(keys, done, strict=True) if ok)
            self._pending[number].update(write.pending)
            self._refused[number].update(write.refused)
            self.reason = self.reason or write.reason


def _too_large_in(write: TierWrite, key: bytes) -> bool:
    return any(write.items[place][0] == key for place in write.too_large)


class TierWrite:
    """Share of a write at a tier: ``prepare`` and ``prepare_rest`` reserve room, then ``start`` and ``end``.

    A thread may read items after its call was given up: a tier with threads needs immutable ``bytes``. ``copies``:
    items stored elsewhere, so a tier that refuses them holds nothing outdated.
    """

    def __init__(self, tier: Tier, items: Items, places: Places, copies: bool = False) -> None:
        self.tier = tier
        self.items = items
        self._places = places or (None,) * len(items)
        self._copies = copies
        self.answered = False  # to ``prepare``
        self.certain = False  # the tier has answered for all items
        self.too_large: _TooLarge = {}  # items that never fit, by position
        self._tickets: _Tickets = []  # with positions of their items
        self._left: list[int] = []  # positions for ``prepare_rest``
        self._call: WorkerCall[list[list[bool]]] | None = None
        self.given_up = False

    @classmethod
    def prepare(cls, tier: Tier, items: Items, places: Places = (), copies: bool = False) -> TierWrite:
        """Reserve room for items with clean keys; if the largest is too large, only in ``prepare_rest``."""
        self = cls(tier, items, places, copies)
        keys = [key for key, _ in items]
        wanted = [
            at
            for at, key in enumerate(keys)
            if not (tier.dirty_keys.uncertain(key) if self._places[at] is None else key in tier.dirty_keys)
        ]
        if not wanted or not tier.usable(keys):
            return self
        prepared = tier.ask(lambda: _prepare(tier, items, self._places, wanted))
        if prepared is not None:
            self.answered = True
            self._tickets, self.too_large, self._left = prepared
        return self

    def prepare_rest(self) -> None:
        positions, self._left = self._left, []
        if positions and (
            prepared := self.tier.ask(lambda: _prepare_rest(self.tier, self.items, self._places, positions))
        ):
            tickets, too_large = prepared
            self._tickets += tickets
            self.too_large |= too_large

    def start(self) -> None:
        tickets, store = self._tickets, self.tier.store
        if tickets and self.tier.usable(()):
            self._call = self.tier.start(lambda: [store.complete_store(ticket) for ticket, _ in tickets])

    def end(self) -> list[bool]:
        """Return True for each item stored in time. Else a changed value may be outdated: its key becomes dirty."""
        done = [False] * len(self.items)
        if self._call is None:
            self.certain = self.answered and len(self.too_large) == len(self.items)
            return done
        keys = [key for key, _ in self.items]
        sent = [at for _, positions in self._tickets for at in positions]
        changing = [keys[at] for at in sent if self._places[at] is None]
        size_bytes = sum(memoryview(value).nbytes for _, value in self.items)
        until_s = self._call.started_s + self.tier.deadline_s("store", size_bytes)

        def stored_late(outcomes: list[list[bool]] | None) -> list[bytes]:
            if self._copies:
                return changing
            return [keys[at] for at in self._stored(outcomes or []) if self._places[at] is None]

        outcomes = self.tier.result_by(
            self._call,
            until_s,
            changes=[keys[at] for at in sent],
            overwrites=changing,
            stored=stored_late,
            kind="store",
            moved=lambda outcomes: size_bytes,
        )
        if outcomes is None:
            self.given_up = self._call.given_up
            if not self.given_up and not self._copies:
                self.tier.dirty_keys.add(changing)
            return done
        self.certain = len(self.too_large) + len(sent) == len(self.items)
        for at in self._stored(outcomes):
            done[at] = True
        self.tier.counters.add("tier_stored_total", sum(done), self.tier.name)
        return done

    def _stored(self, outcomes: list[list[bool]]) -> list[int]:
        return [
            at
            for (_, positions), stored in zip(self._tickets, outcomes, strict=False)
            for at, ok in zip(positions, stored, strict=False)
            if ok
        ]

    @property
    def reason(self) -> str:
        return next((f"{self.tier.name}: {ticket.reason}" for ticket, _ in self._tickets if ticket.reason), "")

    @property
    def refused(self) -> set[bytes]:
        """Keys that the tier answered for, and refused unless stored."""
        if not self.certain:
            return set()
        unanswered = frozenset[bytes]().union(*(ticket.unanswered for ticket, _ in self._tickets))
        return {key for key, _ in self.items if key not in unanswered}

    @property
    def pending(self) -> set[bytes]:
        """Keys that a given-up call may still store."""
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


def _prepare_rest(tier: Tier, items: Items, places: Places, positions: list[int]) -> tuple[_Tickets, _TooLarge]:
    """Reserve room, leaving out the largest item until the rest fits."""
    too_large: _TooLarge = {}
    while positions:
        tickets, more, positions = _prepare(tier, items, places, positions)
        too_large |= more
        if tickets:
            return tickets, too_large
    return [], too_large


def _largest(items: Items, wanted: list[int]) -> int:
    return max(wanted, key=lambda at: memoryview(items[at][1]).nbytes)


def write(tier: Tier, items: Items, places: Places = (), copies: bool = False) -> tuple[list[bool], TierWrite]:
    """Run all phases; True for each item stored, and the write."""
    tier_write = TierWrite.prepare(tier, items, places, copies)
    tier_write.prepare_rest()
    tier_write.start()
    return tier_write.end(), tier_write


def note_missed(
    tier: Tier, missed: set[bytes], places: Mapping[bytes, Place | None], pending: set[bytes], refused: set[bytes]
) -> None:
    """Record that ``missed`` are stored elsewhere. A value that may change is dirty in ``tier``, unless ``pending``; a
    block goes to the backlog, unless ``refused``.
    """
    tier.dirty_keys.add(key for key in missed if places[key] is None and key not in pending)
    blocks = {key: place for key in missed - refused if (place := places[key]) is not None}
    if tier.number:  # the nearest tier gets missing values by promotion when they are read
        tier.backlog.add({key: blocks[key] for key in places if key in blocks})  # in the order of their chain
