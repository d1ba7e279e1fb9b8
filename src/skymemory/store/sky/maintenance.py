"""Commands to all satellites that may hold chunks of a value: evict, keep (lease, pin, touch, expire), copy ahead."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import product

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol import messages
from skymemory.protocol.client.transfer import ValueInfo
from skymemory.protocol.clock import STRATEGY_CODES, SkyMap
from skymemory.protocol.messages import (
    MAX_DEAD_PER_PACKET,
    MAX_KEYS_PER_PACKET,
    MOST_SINCE_S,
    WRITING_S,
    Dead,
    Kept,
    Retain,
    pack_forget,
    pack_retain,
    pack_setting,
    unpack_retained,
)
from skymemory.protocol.wire import Op
from skymemory.store.base import LEASE_S
from skymemory.store.sky.catalog import Catalog
from skymemory.store.sky.driver import ClientDriver

_ARRIVES_WITHIN_S = 1.3
"""A command arrives within this time: it is repeated for 0.8 s, and takes half a second around the world at most."""
_NONE_SPARED: Mapping[bytes, Container[SatelliteId]] = {}


class Maintenance:
    """Commands for many values at once, in one packet per satellite and page of keys."""

    def __init__(
        self, driver: ClientDriver, sky: SkyMap, catalog: Catalog, counters: Counters, replicas: int = 1
    ) -> None:
        self._replicas = range(replicas)
        self._driver = driver
        self._sky = sky
        self._catalog = catalog
        self._counters = counters

    def process_notices(self) -> None:
        """Remove values from the index that satellites have reported as gone (GONE), unless they were set again."""
        if dead := dict(self._driver.machine.take_gone()):
            known = self._catalog.known(list(dead))
            gone = [key for key, info in known.items() if pack_setting(info.value_crc, *info.set_moves) == dead[key]]
            self._counters.add("values_gone_by_notice", len(gone))
            self._catalog.remove(gone)

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
                self._forget(dead, since_s)
            self._catalog.remove([info.key for info in dead])

    def evict_replaced(self, before: Mapping[bytes, ValueInfo], stored: Sequence[ValueInfo]) -> None:
        """Keys were stored again in another placement, or with fewer chunks: evict leftovers of the earlier values,
        where the later ones have no chunks. A look-up without an index would find them.
        """

        def leaves_some(old: ValueInfo, new: ValueInfo) -> bool:
            return not _same_placement(old, new) or min(old.chunks, old.servers) > new.chunks

        moved = [info for info in stored if info.key in before and leaves_some(before[info.key], info)]
        if moved:
            kept = {info.key: set(self._places(info, nearby=True)) for info in moved}
            self._forget([before[info.key] for info in moved], 0.0, but=kept)

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
            self._forget(remains, 0.0)

    def _forget(
        self, infos: Sequence[ValueInfo], since_s: float, but: Mapping[bytes, Container[SatelliteId]] = _NONE_SPARED
    ) -> None:
        """FORGET these values where their chunks are and where they were before the last move, except on the satellites
        in ``but`` for each key, and except what was stored in the last ``since_s``. Other values of the same keys stay.
        Earlier releases, which forget whole keys only, do not get it: leftovers stay there until they are the oldest.
        """
        machine, now_s = self._driver.machine, self._driver.now_s()
        settings = {info.key: (info.key, pack_setting(info.value_crc, *info.set_moves)) for info in infos}
        with self._driver.lock:
            asked = [
                machine.ask(Op.FORGET, pack_forget([settings[key] for key in page], since_s), satellite, now_s)
                for satellite, page in self._pages(infos, nearby=True, but=but, most=MAX_DEAD_PER_PACKET)
            ]
            self._driver.run(asked)

    def delete(self, infos: Sequence[ValueInfo]) -> set[bytes]:
        """EVICT these values where their chunks are, and where they were before the last move. Returns the keys of
        those that can no longer be read: all satellites that may hold one server's share have confirmed that they hold
        nothing. Only these leave the index.
        """
        confirmed = self._evict(self._pages(infos, nearby=True)) if infos else {}
        gone = {
            info.key
            for info in infos
            if any(confirmed.get(info.key, set()).issuperset(share) for share in self._holders(info, nearby=True))
        }
        self._catalog.remove(list(gone))
        return gone

    def _evict(self, pages: Sequence[tuple[SatelliteId, list[bytes]]]) -> dict[bytes, set[SatelliteId]]:
        """Per key, the satellites that have confirmed to hold nothing of it."""
        machine, now_s = self._driver.machine, self._driver.now_s()
        with self._driver.lock:
            asked = {
                machine.ask(Op.EVICT, messages.pack_keys(page), satellite, now_s): (satellite, page)
                for satellite, page in pages
            }
            answers = self._driver.run(asked)
        confirmed: dict[bytes, set[SatelliteId]] = {}
        for number, answer in answers.items():
            satellite, page = asked[number]
            for key in page if answer.ok else ():
                confirmed.setdefault(key, set()).add(satellite)
        return confirmed

    def touch(self, keys: Sequence[bytes]) -> None:
        """The first key becomes the most recently used. A hint: unacknowledged, not repeated."""
        infos = self._catalog.find(keys)
        self._touch([infos[key] for key in dict.fromkeys(keys) if key in infos])

    def touch_before(self, key: bytes) -> None:
        """Touch the blocks before ``key`` in its chain: what was just stored behind them must not outlive them."""
        self._touch(self._catalog.before(key))

    def _touch(self, infos: Sequence[ValueInfo]) -> None:
        self._hint(Retain.TOUCH, 0.0, list(reversed(self._pages(infos, nearby=False))))

    def _hint(self, what: Retain, until_s: float, pages: Sequence[tuple[SatelliteId, list[bytes]]]) -> None:
        machine, now_s = self._driver.machine, self._driver.now_s()
        if not pages:
            return
        with self._driver.lock:
            for satellite, page in pages:
                machine.cancel(machine.ask(Op.RETAIN, pack_retain(what, until_s, page), satellite, now_s))
            self._driver.run(())

    def lease(self, infos: Sequence[ValueInfo], until_s: float) -> None:
        """Protect values from eviction until then, or until we have read them. A hint, sent ahead of the read."""
        self._hint(Retain.LEASE, until_s, self._pages(infos, nearby=False))

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Pin for ``ttl_s`` (0 unpins). A value that one satellite cannot pin is unpinned on the others."""
        infos = self._catalog.find(keys)
        kept = self._retain(Retain.PIN, self._driver.now_s() + ttl_s if ttl_s > 0 else 0.0, list(infos.values()))
        refused = [info for info in infos.values() if not kept[info.key]]
        if refused and ttl_s > 0:
            self._retain(Retain.PIN, 0.0, refused)
        return [kept.get(key, False) for key in keys]

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Expire values after ``ttl_s``; infinite: never."""
        until_s = 0.0 if math.isinf(ttl_s) else max(self._driver.now_s() + ttl_s, 0.001)
        kept = self._retain(Retain.EXPIRE, until_s, list(self._catalog.find(keys).values()))
        return [kept.get(key, False) for key in keys]

    def _retain(self, what: Retain, until_s: float, infos: Sequence[ValueInfo]) -> dict[bytes, bool]:
        """Per key, whether every satellite that holds chunks of its value has promised."""
        machine, now_s = self._driver.machine, self._driver.now_s()
        kept = {info.key: True for info in infos}
        with self._driver.lock:
            asked = {
                machine.ask(Op.RETAIN, pack_retain(what, until_s, page), satellite, now_s): page
                for satellite, page in self._pages(infos, nearby=False)
            }
            answers = self._driver.run(asked)
        for number, answer in answers.items():
            page = asked[number]
            try:
                outcomes = unpack_retained(answer.body) if answer.ok else []
            except MalformedPacket:
                machine.counters.add("packets_malformed")
                outcomes = []
            for at, key in enumerate(page):
                kept[key] = kept[key] and at < len(outcomes) and outcomes[at] is Kept.DONE
        return kept

    def _pages(
        self,
        infos: Iterable[ValueInfo],
        nearby: bool,
        but: Mapping[bytes, Container[SatelliteId]] = _NONE_SPARED,
        most: int = MAX_KEYS_PER_PACKET,
    ) -> list[tuple[SatelliteId, list[bytes]]]:
        """Satellites with the keys that they may hold, ``most`` in a packet, in the order given; except for each key
        those in ``but``.
        """
        by_satellite: dict[SatelliteId, list[bytes]] = {}
        for info in infos:
            spared = but.get(info.key, ())
            for satellite in self._places(info, nearby):
                if satellite not in spared:
                    by_satellite.setdefault(satellite, []).append(info.key)
        return [
            (satellite, keys[at : at + most])
            for satellite, keys in by_satellite.items()
            for at in range(0, len(keys), most)
        ]

    def _places(self, info: ValueInfo, nearby: bool) -> dict[SatelliteId, None]:
        """Where its chunks are; ``nearby``: and where they were before the last move, or will be after the next, which
        may come before a command arrives.
        """
        return dict.fromkeys(place for share in self._holders(info, nearby) for place in share)

    def _holders(self, info: ValueInfo, nearby: bool) -> list[list[SatelliteId]]:
        """Per server that has chunks of it, where these may be: its copies, each ``nearby`` as above."""
        r, p = self._driver.machine.moves(self._driver.now_s())
        steps = [(0, 0), (-1, 0), (0, -1), (1, 0), (0, 1)] if nearby else [(0, 0)]
        every = [
            self._sky.servers_at(info.strategy, info.servers, info.set_moves, (r + slots, p + planes), replica)[
                : info.chunks
            ]
            for (slots, planes), replica in product(steps, self._replicas)
        ]
        return [list(share) for share in zip(*every, strict=True)]


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

    def __init__(self, driver: ClientDriver, sky: SkyMap, catalog: Catalog, counters: Counters) -> None:
        self._driver = driver
        self._sky = sky
        self._catalog = catalog
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
        return info.strategy == _PARKED and info.set_moves == aim

    def _copy(self, infos: Sequence[ValueInfo], aim: Moves) -> set[bytes]:
        """Copy values to around the centre of ``aim``; returns the keys of those that are there now."""
        driver, machine = self._driver, self._driver.machine
        values = {info.key: memoryview(bytearray(info.value_bytes)) for info in infos}
        with driver.lock:
            asked = {machine.get(info, values[info.key], driver.now_s()): info for info in infos}
            read = [asked[number] for number, outcome in driver.run(asked).items() if outcome.ok]
        begun: dict[int, tuple[ValueInfo, ValueInfo]] = {}
        with driver.lock:
            for info in reversed(read):  # the first becomes the most recently used, as in every write of a chain
                number, copy = machine.put(
                    info.key, values[info.key], info.chunk_bytes, _PARKED, info.servers, driver.now_s(), aim
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
        """FORGET obsolete copies whose time has come, except on satellites that hold the value now. Other values of
        these keys stay.
        """
        now_s = self._driver.now_s()
        due = [info for due_s, info in self._obsolete if due_s <= now_s]
        self._obsolete = [copy for copy in self._obsolete if copy[0] > now_s]
        if not due or self._catalog.index is None:  # without an index it is unknown which copy is the value's place
            return
        current = self._catalog.find(list({info.key for info in due}))
        dead_at: dict[SatelliteId, set[Dead]] = {}
        for info in due:
            kept = self._places(current[info.key]) if info.key in current else set()
            for satellite in self._places(info) - kept:
                dead_at.setdefault(satellite, set()).add((info.key, pack_setting(info.value_crc, *info.set_moves)))
        machine = self._driver.machine
        with self._driver.lock:
            asked = [
                machine.ask(Op.FORGET, pack_forget(page, 0.0), satellite, now_s)
                for satellite, dead in dead_at.items()
                for page in _pages(sorted(dead))
            ]
            self._driver.run(asked)

    def _places(self, info: ValueInfo) -> set[SatelliteId]:
        """Every satellite that may hold chunks of the value now, including those of a move ago."""
        r, p = self._driver.machine.moves(self._driver.now_s())
        places: set[SatelliteId] = set()
        for moves in ((r, p), (r - 1, p), (r, p - 1)):
            places.update(self._sky.servers_at(info.strategy, info.servers, info.set_moves, moves)[: info.chunks])
        return places


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


def _pages(dead: Sequence[Dead]) -> Iterator[Sequence[Dead]]:
    for at in range(0, len(dead), MAX_DEAD_PER_PACKET):
        yield dead[at : at + MAX_DEAD_PER_PACKET]
