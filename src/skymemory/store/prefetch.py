"""Prefetch: values copied to the satellites that will be overhead at a given time, before that time comes.

A value stored with a migrating strategy follows the box by itself: nothing is to be done. A *parked* value (``hop`` or
``baseline``: its satellites fly away with it, and no migration is paid for it) is read from wherever it is and written,
as ``hop``, around the satellite that will be overhead: there it waits. Copy, switch, forget: the index entry changes
only when every chunk of the copy is acknowledged, and only if it still is what was copied; the chunks left behind are
forgotten a lease later, for whoever is reading them. Whatever fails, the value is where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.dead import MAX_DEAD_PER_PACKET, Dead, pack_forget, pack_setting
from skymemory.protocol.motion import STRATEGY_CODES, SkyMap
from skymemory.protocol.transfer import ValueInfo
from skymemory.protocol.wire import Op
from skymemory.store.base import LEASE_S
from skymemory.store.catalog import Catalog
from skymemory.store.driver import ClientDriver

BATCH_BYTES = 8 << 20
"""Values copied at once: so much memory, and so long may a read of the same client have to wait for its turn."""
_PARKED = STRATEGY_CODES["hop"]


class Prefetcher:
    """Copies values of one store ahead of time."""

    def __init__(self, driver: ClientDriver, sky: SkyMap, catalog: Catalog, counters: Counters) -> None:
        self._driver = driver
        self._sky = sky
        self._catalog = catalog
        self._counters = counters
        self._left_behind: list[tuple[float, ValueInfo]] = []
        """Copies that are not the value's place any more, or never became it, and when to forget them."""

    def run(self, keys: Sequence[bytes], at_s: float, target: Moves | None) -> list[bool]:
        """Per key: whether its value will be near at ``at_s``. ``target``: the moves of another place's box."""
        self._forget_left_behind()
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
        """Keys of the values that are now around the centre of ``aim``."""
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
                self._left_behind.append((driver.now_s() + LEASE_S, info))
            else:
                self._left_behind.append((driver.now_s(), copy))
        return done

    def _forget_left_behind(self) -> None:
        """Have what was left behind long enough ago forgotten, by its setting: what others have stored there stays. But
        for the satellites that hold the value now.
        """
        now_s = self._driver.now_s()
        due = [info for due_s, info in self._left_behind if due_s <= now_s]
        self._left_behind = [left for left in self._left_behind if left[0] > now_s]
        if not due or self._catalog.index is None:  # without an index nobody can say which copy is the value's place
            return
        current = self._catalog.find(list({info.key for info in due}))
        left: dict[SatelliteId, set[Dead]] = {}
        for info in due:
            kept = self._places(current[info.key]) if info.key in current else set()
            for satellite in self._places(info) - kept:
                left.setdefault(satellite, set()).add((info.key, pack_setting(info.value_crc, *info.set_moves)))
        machine = self._driver.machine
        with self._driver.lock:
            asked = [
                machine.ask(Op.FORGET, pack_forget(page, 0.0), satellite, now_s)
                for satellite, dead in left.items()
                for page in _pages(sorted(dead))
            ]
            self._driver.run(asked)

    def _places(self, info: ValueInfo) -> set[SatelliteId]:
        """Every satellite that may hold chunks of the value now: of a box on the move also those of a move ago."""
        r, p = self._driver.machine.moves(self._driver.now_s())
        places: set[SatelliteId] = set()
        for moves in ((r, p), (r - 1, p), (r, p - 1)):
            places.update(self._sky.servers_at(info.strategy, info.servers, info.set_moves, moves)[: info.chunks])
        return places


def _batches(infos: Iterable[ValueInfo]) -> Iterator[list[ValueInfo]]:
    """Runs of at most ``BATCH_BYTES``, but at least one value each."""
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
