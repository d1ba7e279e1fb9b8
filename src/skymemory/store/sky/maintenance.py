"""Upkeep of values on satellites: evicting useless chunks, copying ahead of time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from threading import Lock

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.client.transfer import Striping, ValueInfo
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
from skymemory.reasons import Miss
from skymemory.store.base import LEASE_S
from skymemory.store.sky.catalog import NONE_SPARED, Catalog, Holders, Reach
from skymemory.store.sky.probing import ClientDriver, ask_all, read_answer

_ARRIVES_WITHIN_S = 1.3  # time in which a command arrives: 0.8 s of repeats, at most 0.5 s around the world


_MOST_OWED = 1024
_PAYS_EVERY_S = 1.0
_Places = defaultdict[bytes, set[SatelliteId]]


class Evictor:
    """Evictor. EVICT removes any value under a key; FORGET only chunks of one setting (bytes and moves)."""

    def __init__(self, driver: ClientDriver, catalog: Catalog, holders: Holders, counters: Counters) -> None:
        self._driver = driver
        self._catalog = catalog
        self._holders = holders
        self._counters = counters
        self._owed: dict[ValueInfo, float] = {}  # replaced values of silent satellites, and the times of replacement
        self._owing = Lock()
        self._pays_s = -math.inf  # time of the next ``pay``

    def evict_holed(self, infos: Sequence[ValueInfo], looked_s: float) -> None:
        """Evict the rest of values that reads, started at ``looked_s``, found incomplete. If the key was set again,
        only our entry is dropped.
        """
        replaced = self._catalog.replaced(infos)
        dead = [info for info in infos if info.key not in replaced]
        self._catalog.remove(list(replaced), is_gone=False)
        if dead:
            self._counters.add("values_evicted_lazily", len(dead))
            # WRITING_S: spare chunks that a writer was still writing at ``looked_s``
            since_s = self._driver.now_s() - looked_s + _ARRIVES_WITHIN_S + WRITING_S
            if since_s <= MOST_SINCE_S:  # else satellites no longer know whether the key was set since
                self.forget(dead, since_s)
            self._catalog.remove([info.key for info in dead])

    def evict_replaced(self, before: Mapping[bytes, ValueInfo], stored: Sequence[ValueInfo]) -> None:
        """Evict leftovers of replaced values, which readers without an index would take for the value, sparing the new
        chunks. Silent satellites are asked again (``pay``).
        """

        def leaves_some(old: ValueInfo, new: ValueInfo) -> bool:
            passed_over = self._holders.replicas > 1 and not _same_bytes(old, new)
            return passed_over or not _same_placement(old, new) or min(old.chunks, old.servers) > new.chunks

        overlapping = [info for info in stored if info.key in before and leaves_some(before[info.key], info)]
        if overlapping:
            same_setting = [info for info in overlapping if _setting(info) == _setting(before[info.key])]
            spared = {info.key: self._holders.of(info, "nearby") for info in same_setting}
            replaced = [before[info.key] for info in overlapping]
            silent = self.forget(replaced, but=spared)
            self._owe([info for info in replaced if info.key in silent and info.key not in spared])

    def _owe(self, infos: Iterable[ValueInfo]) -> None:
        now_s = self._driver.now_s()
        with self._owing:
            self._owed.update(dict.fromkeys(infos, now_s))
            while len(self._owed) > _MOST_OWED:
                del self._owed[next(iter(self._owed))]
                self._counters.add("evictions_dropped")

    def _settle(self, infos: Iterable[ValueInfo]) -> None:
        with self._owing:
            for info in infos:
                self._owed.pop(info, None)

    def pay(self) -> None:
        """Repeat unanswered evictions, at most once per second, wherever the chunks may be."""
        if not self._owed or (now_s := self._driver.now_s()) < self._pays_s:
            return
        self._pays_s = now_s + _PAYS_EVERY_S
        with self._owing:
            owed = dict(self._owed)
        current = self._catalog.known(list({info.key for info in owed}))
        current_again = {info for info in owed if info.key in current and _setting(current[info.key]) == _setting(info)}
        self._settle(current_again)
        unpaid = [item for item in owed.items() if item[0] not in current_again]
        for since_s, group in groupby(unpaid, lambda item: min(now_s - item[1], MOST_SINCE_S)):
            infos = [info for info, _ in group]
            silent = self.forget(infos, since_s, reach="ever")
            self._settle(info for info in infos if info.key not in silent)

    def clean_up_failed(self, failed: Sequence[ValueInfo], before: Mapping[bytes, ValueInfo]) -> None:
        """Evict the parts of failed stores, if a complete index proves that they belong to no intact value."""
        remains: list[ValueInfo] = []
        if self._catalog.index is not None and self._catalog.index.complete:
            now = self._catalog.known([info.key for info in failed])
            known = {
                info.key: [entries[info.key] for entries in (before, now) if info.key in entries] for info in failed
            }
            remains = [info for info in failed if not any(_same_bytes(info, entry) for entry in known[info.key])]
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
        """FORGET values, sparing satellites in ``but`` and chunks stored in the last ``since_s``. Return the keys of
        silent satellites.
        """
        questions = []
        for satellite, page in self._holders.pages(infos, reach, but=but, most=MAX_DEAD_PER_PACKET):
            dead = [(info.key, _setting(info)) for info in page]
            questions.append((satellite, pack_forget(dead, since_s), page))
        answers = ask_all(self._driver, Op.FORGET, questions)
        silent = [page for page, answer in answers if not answer.ok and answer.report.failure is not Miss.UNSUPPORTED]
        return {info.key for page in silent for info in page}

    def delete(self, infos: Sequence[ValueInfo]) -> set[bytes]:
        """EVICT values. Return the keys no longer readable: of some server's share every copy was evicted, or all
        satellites that may have had it hold nothing.
        """
        keys, holders, confirmed, emptied = {info.key for info in infos}, self._holders, _Places(set), _Places(set)
        with self._owing:
            owed = [info for info in self._owed if info.key in keys]
        infos = [*infos, *owed]
        self._evict(infos, "nearby", confirmed, emptied)
        unconfirmed = [
            info
            for info in infos
            if not any(
                confirmed[info.key].issuperset(near) and emptied[info.key].issuperset(now)
                for near, now in zip(holders.shares(info, "nearby"), holders.shares(info, "now"), strict=True)
            )
        ]
        # The remaining values may have been evicted before, or be on a satellite that did not answer at a handover.
        self._evict(unconfirmed, "ever", confirmed, emptied)
        for info in unconfirmed:
            if not any(confirmed[info.key].issuperset(share) for share in holders.shares(info, "ever")):
                keys.discard(info.key)
        self._settle(info for info in owed if info.key in keys)
        self._catalog.remove(list(keys), patient=True)
        return keys

    def _evict(self, infos: Sequence[ValueInfo], reach: Reach, confirmed: _Places, emptied: _Places) -> None:
        """EVICT. ``confirmed`` gets satellites that hold nothing, ``emptied`` those that had all chunks."""
        expected = {info: self._holders.chunks_of(info) for info in infos}
        pages = self._holders.pages(infos, reach, but=confirmed)
        evicts = [(at, pack_keys([info.key for info in page]), (at, page)) for at, page in pages]
        for (satellite, page), answer in ask_all(self._driver, Op.EVICT, evicts):
            for freed in read_answer(self._driver, answer, lambda body: [unpack_count(body)]):
                had_all = freed >= sum(expected[info][satellite] for info in page)
                for info in page:
                    confirmed[info.key].add(satellite)
                    if had_all:
                        emptied[info.key].add(satellite)


def _setting(info: ValueInfo) -> bytes:
    return pack_setting(info.value_crc, *info.set_moves)


def _same_bytes(info: ValueInfo, other: ValueInfo) -> bool:
    return (info.value_bytes, info.value_crc) == (other.value_bytes, other.value_crc)


def _same_placement(info: ValueInfo, other: ValueInfo) -> bool:
    return (info.strategy, info.servers, info.set_moves) == (other.strategy, other.servers, other.set_moves)


BATCH_BYTES = 8 << 20
"""Limit of bytes copied at once: it bounds memory and concurrent reads' waits."""
_PARKED = STRATEGY_CODES["hop"]


class Prefetcher:
    """Copier of values to the satellites overhead at a given time.

    Values of migrating strategies follow the box. A *parked* value (``hop`` or ``baseline``) is

    1. read, and written as ``hop`` around the satellite that will be overhead;
    2. switched, once every chunk is acknowledged, if its index entry is unchanged;
    3. forgotten in its old place a lease later.
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
        self._obsolete: list[tuple[float, ValueInfo]] = []  # copies to delete, and when

    def run(self, keys: Sequence[bytes], at_s: float, target: Moves | None) -> list[bool]:
        """Return True per key if it will be near at ``at_s``. ``target``: moves of another place's box."""
        self._forget_obsolete()
        # Moves: slots and planes by which the box of satellites has moved since the epoch.
        follows_box = target is None
        target_moves = self._driver.machine.moves_at(at_s) if target is None else target
        infos = self._catalog.find(keys)
        ready = {info.key for info in infos.values() if self._is_there(info, target_moves, follows_box)}
        wanted = [info for info in infos.values() if info.key not in ready]
        for batch in _batches(wanted):
            ready.update(self._copy(batch, target_moves))
        self._counters.add("prefetched", len(ready.intersection(info.key for info in wanted)))
        self._counters.add("prefetch_failures", len(infos) - len(ready))
        return [key in ready for key in keys]

    def _is_there(self, info: ValueInfo, aim: Moves, follows_box: bool) -> bool:
        if self._sky.placement(info.strategy, info.servers).migrates:
            return follows_box
        return displaced(info.strategy, 0) == _PARKED and info.set_moves == aim

    def _copy(self, infos: Sequence[ValueInfo], aim: Moves) -> set[bytes]:
        """Copy values around the satellite overhead after the moves ``aim``; return the keys whose entry names the
        copy.
        """
        driver, machine, replicas = self._driver, self._driver.machine, self._holders.replicas
        values = {info.key: memoryview(bytearray(info.value_bytes)) for info in infos}
        with driver.lock:
            gets = {machine.get(info, values[info.key], driver.now_s(), replicas): info for info in infos}
        read = [gets[number] for number, outcome in driver.run(gets).items() if outcome.ok]
        puts: dict[int, tuple[ValueInfo, ValueInfo]] = {}
        with driver.lock:
            # Reversed: the first becomes the most recently used, as in every write of a chain.
            for info in reversed(read):
                number, copy = machine.put(
                    info.key,
                    values[info.key],
                    Striping(info.chunk_bytes, _PARKED, info.servers, replicas),
                    driver.now_s(),
                    aim,
                )
                puts[number] = info, copy
        finished = driver.run(puts)
        self._counters.add("prefetched_bytes", sum(copy.value_bytes for _, copy in puts.values()))
        done = set()
        for number, (info, copy) in puts.items():
            if finished[number].ok and self._catalog.switch(info, copy, driver.now_s()):
                done.add(info.key)
                self._obsolete.append((driver.now_s() + LEASE_S, info))
            else:
                self._obsolete.append((driver.now_s(), copy))
        return done

    def _forget_obsolete(self) -> None:
        """Delete copies that are due, except on the current copy's satellites."""
        now_s = self._driver.now_s()
        expired = [info for due_s, info in self._obsolete if due_s <= now_s]
        self._obsolete = [copy for copy in self._obsolete if copy[0] > now_s]
        if expired and self._catalog.index is not None:  # an index is needed to know which copy is the value's place
            current = self._catalog.find(list({info.key for info in expired}))
            spared = {key: self._holders.of(info, "nearby") for key, info in current.items()}
            self._evictor.forget(list(dict.fromkeys(expired)), but=spared)


def _batches(infos: Iterable[ValueInfo]) -> Iterator[list[ValueInfo]]:
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
