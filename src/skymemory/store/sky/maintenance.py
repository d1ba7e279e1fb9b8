"""Upkeep of values in the sky: evicting what is useless (``Evictor``), copying ahead of a time (``Prefetcher``)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from threading import Lock

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.client.transfer import ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES, SkyMap, displaced
from skymemory.protocol.messages import (
    MAX_DEAD_PER_PACKET,
    MOST_SINCE_S,
    WRITING_S,
    pack_forget,
    pack_keys,
    pack_setting,
    unpack_count,
)
from skymemory.protocol.wire import Op
from skymemory.store.base import LEASE_S
from skymemory.store.sky.catalog import NONE_SPARED, Catalog, Holders, Reach
from skymemory.store.sky.probing import ClientDriver, ask_all, read_answer

_ARRIVES_WITHIN_S = 1.3
"""A command arrives within this time: it is repeated for 0.8 s, and takes half a second around the world at most."""


_MOST_OWED = 1024
_PAYS_EVERY_S = 1.0
_Places = defaultdict[bytes, set[SatelliteId]]
"""Satellites by key."""


class Evictor:
    """Evicts many values at once, in one packet per satellite and page of keys: EVICT takes whatever is under a key,
    FORGET only the chunks of one setting of it.
    """

    def __init__(self, driver: ClientDriver, catalog: Catalog, holders: Holders, counters: Counters) -> None:
        self._driver = driver
        self._catalog = catalog
        self._holders = holders
        self._counters = counters
        self._owed: dict[ValueInfo, float] = {}
        """Replaced values of which satellites that were silent may have chunks, and when they were replaced."""
        self._owing = Lock()
        """Held while ``_owed`` is read or changed, and not while satellites are asked."""
        self._pays_s = -math.inf

    def evict_holed(self, infos: Sequence[ValueInfo], looked_s: float) -> None:
        """Reads that began at ``looked_s`` found chunks of these gone: evict the rest. If another writer has set such a
        key again meanwhile, only our entry is stale.
        """
        replaced = self._catalog.replaced(infos)
        dead = [info for info in infos if info.key not in replaced]
        self._catalog.remove(list(replaced), gone=False)
        if dead:
            self._counters.add("values_evicted_lazily", len(dead))
            # WRITING_S: spare what a writer was still writing when we looked
            since_s = self._driver.now_s() - looked_s + _ARRIVES_WITHIN_S + WRITING_S
            if since_s <= MOST_SINCE_S:  # else satellites do not remember whether it was set since
                self.forget(dead, since_s)
            self._catalog.remove([info.key for info in dead])

    def evict_replaced(self, before: Mapping[bytes, ValueInfo], stored: Sequence[ValueInfo]) -> None:
        """Keys were stored again: evict leftovers of the earlier values, in another placement, with more chunks, or as
        copies whose satellites were passed over; of the same bytes set at the same moves, where the later ones have no
        chunks. A lookup without an index would find them, and other readers take them for the value. Where a satellite
        is silent, it is owed the eviction (``pay``).
        """

        def leaves_some(old: ValueInfo, new: ValueInfo) -> bool:
            passed_over = self._holders.replicas > 1 and not _same_bytes(old, new)
            return passed_over or not _same_placement(old, new) or min(old.chunks, old.servers) > new.chunks

        moved = [info for info in stored if info.key in before and leaves_some(before[info.key], info)]
        if moved:
            again = [info for info in moved if _setting(info) == _setting(before[info.key])]
            kept = {info.key: self._holders.of(info, "nearby") for info in again}
            replaced = [before[info.key] for info in moved]
            silent = self.forget(replaced, but=kept)
            self._owe([info for info in replaced if info.key in silent and info.key not in kept])

    def _owe(self, infos: Iterable[ValueInfo]) -> None:
        now_s = self._driver.now_s()
        with self._owing:
            self._owed.update(dict.fromkeys(infos, now_s))
            while len(self._owed) > _MOST_OWED:
                del self._owed[next(iter(self._owed))]
                self._counters.add("evictions_dropped")

    def _settle(self, infos: Iterable[ValueInfo]) -> None:
        """They are not owed any more."""
        with self._owing:
            for info in infos:
                self._owed.pop(info, None)

    def pay(self) -> None:
        """Evict what silent satellites are owed, wherever it may be by now; until they answer, again at times."""
        if not self._owed or (now_s := self._driver.now_s()) < self._pays_s:
            return
        self._pays_s = now_s + _PAYS_EVERY_S
        with self._owing:
            owed = dict(self._owed)
        current = self._catalog.known(list({info.key for info in owed}))
        again = {info for info in owed if info.key in current and _setting(current[info.key]) == _setting(info)}
        self._settle(again)
        left = [item for item in owed.items() if item[0] not in again]
        for since_s, group in groupby(left, lambda item: min(now_s - item[1], MOST_SINCE_S)):
            infos = [info for info, _ in group]
            silent = self.forget(infos, since_s, reach="ever")
            self._settle(info for info in infos if info.key not in silent)

    def clean_up_failed(self, failed: Sequence[ValueInfo], before: Mapping[bytes, ValueInfo]) -> None:
        """These could not be stored whole: evict what was stored of them, if the same bytes were certainly not there
        before: a complete index had no such entry, and still has none. Otherwise they stay, for they may be chunks of a
        sound value; a read will find what is missing.
        """
        remains: list[ValueInfo] = []
        if self._catalog.index is not None and self._catalog.index.complete:
            now = self._catalog.known([info.key for info in failed])
            known = {info.key: [one[info.key] for one in (before, now) if info.key in one] for info in failed}
            remains = [info for info in failed if not any(_same_bytes(info, one) for one in known[info.key])]
        self._counters.add("failed_stores_left", len(failed) - len(remains))
        if remains:
            self.forget(remains)

    def forget(
        self,
        infos: Sequence[ValueInfo],
        since_s: float = 0.0,
        but: Mapping[bytes, Container[SatelliteId]] = NONE_SPARED,
        reach: Reach = "nearby",
    ) -> set[bytes]:
        """FORGET these values where their chunks are and where they were before the last move, except on the satellites
        in ``but`` for each key, and except what was stored in the last ``since_s``. Other values of the same keys stay.
        Earlier releases, which forget whole keys only, do not get it: leftovers stay there until they are the oldest.
        Returns the keys of which a satellite did not answer.
        """
        questions = []
        for satellite, page in self._holders.pages(infos, reach, but=but, most=MAX_DEAD_PER_PACKET):
            dead = [(info.key, _setting(info)) for info in page]
            questions.append((satellite, pack_forget(dead, since_s), page))
        answers = ask_all(self._driver, Op.FORGET, questions)
        silent = [page for page, answer in answers if not answer.ok and answer.report.failure != "unsupported"]
        return {info.key for page in silent for info in page}

    def delete(self, infos: Sequence[ValueInfo]) -> set[bytes]:
        """EVICT these values where their chunks are, and where they were before the last move. Returns the keys of
        those that can no longer be read: of one server's share every copy was evicted where it belongs, or all
        satellites on which it can ever have been left have confirmed that they hold nothing. Only these leave the
        index.
        """
        keys, holders, confirmed, emptied = {info.key for info in infos}, self._holders, _Places(set), _Places(set)
        with self._owing:
            owed = [info for info in self._owed if info.key in keys]
        infos = [*infos, *owed]
        self._evict(infos, "nearby", confirmed, emptied)
        rest = [
            info
            for info in infos
            if not any(
                confirmed[info.key].issuperset(near) and emptied[info.key].issuperset(now)
                for near, now in zip(holders.shares(info, "nearby"), holders.shares(info, "now"), strict=True)
            )
        ]
        # What was not found may have been evicted before, or be on a satellite that was silent at a handover.
        self._evict(rest, "ever", confirmed, emptied)
        for info in rest:
            if not any(confirmed[info.key].issuperset(share) for share in holders.shares(info, "ever")):
                keys.discard(info.key)
        self._settle(info for info in owed if info.key in keys)
        self._catalog.remove(list(keys), patient=True)
        return keys

    def _evict(self, infos: Sequence[ValueInfo], reach: Reach, confirmed: _Places, emptied: _Places) -> None:
        """Adds per key the satellites that hold nothing of it any more, and those that had all that they should; asks
        none that is ``confirmed``.
        """
        due = {info: self._holders.chunks_of(info) for info in infos}
        pages = self._holders.pages(infos, reach, but=confirmed)
        evicts = [(at, pack_keys([info.key for info in page]), (at, page)) for at, page in pages]
        for (satellite, page), answer in ask_all(self._driver, Op.EVICT, evicts):
            for freed in read_answer(self._driver, answer, lambda body: [unpack_count(body)]):
                had_all = freed >= sum(due[info][satellite] for info in page)
                for info in page:
                    confirmed[info.key].add(satellite)
                    if had_all:
                        emptied[info.key].add(satellite)


def _setting(info: ValueInfo) -> bytes:
    """What FORGET knows a value by."""
    return pack_setting(info.value_crc, *info.set_moves)


def _same_bytes(one: ValueInfo, other: ValueInfo) -> bool:
    return (one.value_bytes, one.value_crc) == (other.value_bytes, other.value_crc)


def _same_placement(one: ValueInfo, other: ValueInfo) -> bool:
    return (one.strategy, one.servers, one.set_moves) == (other.strategy, other.servers, other.set_moves)


BATCH_BYTES = 8 << 20
"""Values copied at once: this bounds the memory, and how long a read of the same client may have to wait."""
_PARKED = STRATEGY_CODES["hop"]


class Prefetcher:
    """Copies values to the satellites that will be overhead at a given time, before that time comes.

    A value with a migrating strategy follows the box by itself. A *parked* value (``hop`` or ``baseline``: its
    satellites fly away with it, and no migration is paid for it) is

    1. read from wherever it is, and written, as ``hop``, around the satellite that will be overhead;
    2. switched: the index entry changes once every chunk of the copy is acknowledged, if the entry is still the same;
    3. forgotten in its old place a lease later, when no reader needs it any more.

    Whatever fails, the value is where it was.
    """

    def __init__(
        self,
        driver: ClientDriver,
        sky: SkyMap,
        catalog: Catalog,
        holders: Holders,
        evictor: Evictor,
        counters: Counters,
    ) -> None:
        self._driver = driver
        self._sky = sky
        self._catalog = catalog
        self._holders = holders
        self._evictor = evictor
        self._counters = counters
        self._obsolete: list[tuple[float, ValueInfo]] = []
        """Obsolete copies, old ones and those whose switch failed, and when to forget them."""

    def run(self, keys: Sequence[bytes], at_s: float, target: Moves | None) -> list[bool]:
        """Per key, whether its value will be near at ``at_s``. ``target``: the moves of another place's box."""
        self._forget_obsolete()
        follows_box = target is None
        aim = self._driver.machine.moves_at(at_s) if target is None else target
        infos = self._catalog.find(keys)
        ready = {info.key for info in infos.values() if self._is_there(info, aim, follows_box)}
        wanted = [info for info in infos.values() if info.key not in ready]
        for batch in _batches(wanted):
            ready.update(self._copy(batch, aim))
        self._counters.add("prefetched", len(ready.intersection(info.key for info in wanted)))
        self._counters.add("prefetch_failures", len(infos) - len(ready))
        return [key in ready for key in keys]

    def _is_there(self, info: ValueInfo, aim: Moves, follows_box: bool) -> bool:
        if self._sky.placement(info.strategy, info.servers).migrates:
            return follows_box
        return displaced(info.strategy, 0) == _PARKED and info.set_moves == aim

    def _copy(self, infos: Sequence[ValueInfo], aim: Moves) -> set[bytes]:
        """Copy values to around the centre of ``aim``; returns the keys of those that are there now."""
        driver, machine, replicas = self._driver, self._driver.machine, self._holders.replicas
        values = {info.key: memoryview(bytearray(info.value_bytes)) for info in infos}
        with driver.lock:
            asked = {machine.get(info, values[info.key], driver.now_s(), replicas): info for info in infos}
        read = [asked[number] for number, outcome in driver.run(asked).items() if outcome.ok]
        begun: dict[int, tuple[ValueInfo, ValueInfo]] = {}
        with driver.lock:
            for info in reversed(read):  # the first becomes the most recently used, as in every write of a chain
                number, copy = machine.put(
                    info.key, values[info.key], info.chunk_bytes, _PARKED, info.servers, driver.now_s(), aim, replicas
                )
                begun[number] = info, copy
        finished = driver.run(begun)
        self._counters.add("prefetched_bytes", sum(copy.value_bytes for _, copy in begun.values()))
        done = set()
        for number, (info, copy) in begun.items():
            if finished[number].ok and self._catalog.switch(info, copy, driver.now_s()):
                done.add(info.key)
                self._obsolete.append((driver.now_s() + LEASE_S, info))
            else:
                self._obsolete.append((driver.now_s(), copy))
        return done

    def _forget_obsolete(self) -> None:
        """FORGET obsolete copies whose time has come, except on satellites that hold the value now."""
        now_s = self._driver.now_s()
        due = [info for due_s, info in self._obsolete if due_s <= now_s]
        self._obsolete = [copy for copy in self._obsolete if copy[0] > now_s]
        if due and self._catalog.index is not None:  # without an index it is unknown which copy is the value's place
            current = self._catalog.find(list({info.key for info in due}))
            kept = {key: self._holders.of(info, "nearby") for key, info in current.items()}
            self._evictor.forget(list(dict.fromkeys(due)), but=kept)


def _batches(infos: Iterable[ValueInfo]) -> Iterator[list[ValueInfo]]:
    """Batches of at most ``BATCH_BYTES``, with at least one value each."""
    batch: list[ValueInfo] = []
    size_bytes = 0
    for info in infos:
        if batch and size_bytes + info.value_bytes > BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(info)
        size_bytes += info.value_bytes
    if batch:
        yield batch
