"""What a store asks of all satellites that may hold chunks of a value: forget it, keep it, note that it matters."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import product

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol import messages
from skymemory.protocol.dead import MAX_DEAD_PER_PACKET, pack_forget, pack_setting
from skymemory.protocol.latecomers import MOST_SINCE_S, WRITING_S
from skymemory.protocol.messages import MAX_KEYS_PER_PACKET
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.retention import Kept, Retain, pack_retain, unpack_retained
from skymemory.protocol.transfer import ValueInfo
from skymemory.protocol.wire import Op
from skymemory.store.catalog import Catalog
from skymemory.store.driver import ClientDriver

_ON_ITS_WAY_S = 1.3
"""What we say arrives within this time: it is repeated for 0.8 s, and takes half a second around the world at most."""
_NOWHERE: Mapping[bytes, Container[SatelliteId]] = {}


class Upkeep:
    """One question to each satellite concerned, for many values at once."""

    def __init__(
        self, driver: ClientDriver, sky: SkyMap, catalog: Catalog, counters: Counters, replicas: int = 1
    ) -> None:
        self._replicas = range(replicas)
        self._driver = driver
        self._sky = sky
        self._catalog = catalog
        self._counters = counters

    def hear(self) -> None:
        """What satellites have said is dead (GONE) leaves the index, unless it was set anew meanwhile."""
        if dead := dict(self._driver.machine.take_gone()):
            known = self._catalog.settled(list(dead))
            gone = [
                key for key, info in known.items() if pack_setting(info.value_crc, *info.set_moves) == dead[key]
            ]  # fmt: skip
            self._counters.add("values_gone_by_notice", len(gone))
            self._catalog.remove(gone)

    def evict_dead(self, infos: Sequence[ValueInfo], looked_s: float) -> None:
        """Reads that began at ``looked_s`` found that these have holes. What another writer has set anew meanwhile is
        not dead: only our entry of it is out of date.
        """
        replaced = self._catalog.replaced(infos)
        dead = [info for info in infos if info.key not in replaced]
        self._catalog.remove(list(replaced), gone=False)
        if dead:
            self._counters.add("values_evicted_lazily", len(dead))
            # WRITING_S: nor what somebody was still writing when we looked
            since_s = self._driver.now_s() - looked_s + _ON_ITS_WAY_S + WRITING_S
            if since_s <= MOST_SINCE_S:  # else satellites do not remember whether it was set since
                self._forget(dead, since_s)
            self._catalog.remove([info.key for info in dead])

    def evict_replaced(self, before: Mapping[bytes, ValueInfo], stored: Sequence[ValueInfo]) -> None:
        """Forget what is left of earlier values of keys that were stored again in another placement, or with fewer
        chunks, where the later ones have none: a look-up without an index would find them.
        """

        def leaves_some(old: ValueInfo, new: ValueInfo) -> bool:
            return not _same_placement(old, new) or min(old.chunks, old.servers) > new.chunks

        moved = [info for info in stored if info.key in before and leaves_some(before[info.key], info)]
        if moved:
            kept = {info.key: set(self._places(info, nearby=True)) for info in moved}
            self._forget([before[info.key] for info in moved], 0.0, but=kept)

    def take_back(self, failed: Sequence[ValueInfo], before: Mapping[bytes, ValueInfo]) -> None:
        """These could not be stored whole. What was of them is forgotten where it is certain that the same bytes were
        not there before: a complete index knew of none, and knows of none still. Elsewhere it stays, for it may be
        chunks of a sound value, and a read finds what is missing.
        """
        remains: list[ValueInfo] = []
        if self._catalog.index is not None and self._catalog.index.complete:
            now = self._catalog.settled([info.key for info in failed])
            known = {info.key: [one[info.key] for one in (before, now) if info.key in one] for info in failed}
            remains = [info for info in failed if not any(_same_bytes(info, one) for one in known[info.key])]
        self._counters.add("failed_stores_left", len(failed) - len(remains))
        if remains:
            self._forget(remains, 0.0)

    def _forget(
        self, infos: Sequence[ValueInfo], since_s: float, but: Mapping[bytes, Container[SatelliteId]] = _NOWHERE
    ) -> None:
        """Have satellites (for each key ``but`` some) forget these settings where their chunks are and where they were
        before the last move; but not what was stored in the last ``since_s``. What is there under the same keys in
        other settings stays. Earlier releases, which forget keys only, are not asked: there the remains stay until they
        are the oldest.
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
        """Forget these values: here, where their chunks are, and where they were before the last move. The keys of
        those that can no longer be read: all satellites that may hold one server's share of them have confirmed that
        they hold nothing. Only these leave the index.
        """
        let_go = self._evict(self._pages(infos, nearby=True)) if infos else {}
        gone = {
            info.key
            for info in infos
            if any(let_go.get(info.key, set()).issuperset(share) for share in self._holders(info, nearby=True))
        }
        self._catalog.remove(list(gone))
        return gone

    def _evict(self, pages: Sequence[tuple[SatelliteId, list[bytes]]]) -> dict[bytes, set[SatelliteId]]:
        """For each key the satellites that confirmed to hold nothing of it."""
        machine, now_s = self._driver.machine, self._driver.now_s()
        with self._driver.lock:
            asked = {
                machine.ask(Op.EVICT, messages.pack_keys(page), satellite, now_s): (satellite, page)
                for satellite, page in pages
            }
            answers = self._driver.run(asked)
        let_go: dict[bytes, set[SatelliteId]] = {}
        for number, answer in answers.items():
            satellite, page = asked[number]
            for key in page if answer.ok else ():
                let_go.setdefault(key, set()).add(satellite)
        return let_go

    def touch(self, keys: Sequence[bytes]) -> None:
        """The first key becomes the most recently used. A hint: nobody answers, nothing is repeated."""
        infos = self._catalog.find(keys)
        self._touch([infos[key] for key in dict.fromkeys(keys) if key in infos])

    def touch_before(self, key: bytes) -> None:
        """The blocks before ``key`` in its chain: whatever was just stored behind them is not to outlive them."""
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
        """Not to be evicted until then, or until we have read them. Sent ahead of the read, unacknowledged."""
        self._hint(Retain.LEASE, until_s, self._pages(infos, nearby=False))

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Pin for so long (0: no more). A value that some satellite cannot pin is not left pinned on the others."""
        infos = self._catalog.find(keys)
        kept = self._retain(Retain.PIN, self._driver.now_s() + ttl_s if ttl_s > 0 else 0.0, list(infos.values()))
        refused = [info for info in infos.values() if not kept[info.key]]
        if refused and ttl_s > 0:
            self._retain(Retain.PIN, 0.0, refused)
        return [kept.get(key, False) for key in keys]

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Forget these values after so long; infinite: never."""
        until_s = 0.0 if math.isinf(ttl_s) else max(self._driver.now_s() + ttl_s, 0.001)
        kept = self._retain(Retain.EXPIRE, until_s, list(self._catalog.find(keys).values()))
        return [kept.get(key, False) for key in keys]

    def _retain(self, what: Retain, until_s: float, infos: Sequence[ValueInfo]) -> dict[bytes, bool]:
        """For each value whether every satellite that holds chunks of it promised."""
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
        but: Mapping[bytes, Container[SatelliteId]] = _NOWHERE,
        most: int = MAX_KEYS_PER_PACKET,
    ) -> list[tuple[SatelliteId, list[bytes]]]:
        """Satellites (for each key ``but`` some) with the keys that concern them, in the order given, ``most`` in a
        packet.
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
        """Where its chunks are, each once; ``nearby``: and where they were before the last move, or will be after the
        next, which may come before what we say arrives.
        """
        return dict.fromkeys(place for share in self._holders(info, nearby) for place in share)

    def _holders(self, info: ValueInfo, nearby: bool) -> list[list[SatelliteId]]:
        """For each server that has chunks of it, where these may be: its copies, each ``nearby`` as above."""
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
