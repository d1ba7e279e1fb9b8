"""One store over the tiers: through all of them at once, or into the nearest with the others left to the mover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skymemory.cache.outbound import Moving, Outbound
from skymemory.cache.tier import Tier
from skymemory.cache.tier_writes import TierWrite, note_missed
from skymemory.kv.block import Place
from skymemory.store.base import Buffer, Places


class TieredWrite:
    """Room set aside for ``items``. Raises ValueTooLarge for one that fits none of the tiers that answer."""

    def __init__(
        self, items: Sequence[tuple[bytes, Buffer]], places: Places, tiers: Sequence[Tier], outbound: Outbound,
        write_back: bool,
    ) -> None:  # fmt: skip
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
