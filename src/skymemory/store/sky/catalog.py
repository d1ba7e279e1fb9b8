"""Location of values on satellites: ``Catalog`` finds a value's info, ``Holders`` the satellites of its chunks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Literal

from skymemory.constellation.torus import SatelliteId
from skymemory.index.radix import BlockInfo
from skymemory.kv.block import Place
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.protocol.client.transfer import ValueInfo
from skymemory.protocol.clock import SkyMap, placement_code, placement_name
from skymemory.protocol.messages import MAX_KEYS_PER_PACKET
from skymemory.store.sky.probing import MAX_KNOWN, ClientDriver, IndexRebuilder, Prober
from skymemory.store.sky.shared_index import SharedIndex

_MAX_CHAIN = 4096
_FRESH_S = 1.0  # validity of a probe's result: another client may set the key again
_NO_PLACES: Mapping[bytes, Place] = {}
NONE_SPARED: Mapping[bytes, Container[SatelliteId]] = {}


class Catalog:
    """Mapping from key to ``ValueInfo``, from the index, from probes, or both if it is incomplete."""

    def __init__(self, index: SharedIndex | None, prober: Prober, chunk_bytes: int) -> None:
        self.index = index
        self._prober = prober
        self._rebuilder = IndexRebuilder(index, prober, self._enter) if index is not None else None
        self._chunk_bytes = chunk_bytes
        self._known: OrderedDict[bytes, tuple[ValueInfo, float]] = OrderedDict()
        # Predecessors in this process's calls: good enough for a touch, never for the index.
        self._predecessors: OrderedDict[bytes, bytes] = OrderedDict()

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys present; probe what the index may lack."""
        self._learn_order(keys)
        if self.index is not None and self._rebuilder is not None:
            indexed = self.index.longest_prefix(keys)
            return indexed if indexed == len(keys) or self.index.complete else self._rebuilder.prefix(keys, indexed)
        count, known = self._prober.prefix(keys)
        self._remember(known)
        return count

    def find(self, keys: Sequence[bytes]) -> dict[bytes, ValueInfo]:
        return self.search(keys)[0]

    def search(self, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """Return the infos of present keys, and True if the others are certainly absent."""
        self._learn_order(keys)
        if self.index is None or self._rebuilder is None:
            infos, certain = self._prober.search(keys) if keys else ({}, True)
            self._remember(infos)
            return infos, certain
        infos = self.known(keys)
        missing = [key for key in keys if key not in infos]
        if not missing or self.index.complete:
            return infos, True
        probed, certain = self._rebuilder.search(missing)
        infos.update(probed)
        return infos, certain

    def settings_in_box(self, infos: Sequence[ValueInfo]) -> dict[bytes, list[ValueInfo]]:
        return self._prober.settings_in_box([info.key for info in infos])

    def replaced(self, infos: Sequence[ValueInfo]) -> set[bytes]:
        reported = self.settings_in_box(infos)
        return {info.key for info in infos if _replacement_of(info, reported.get(info.key, ())) is not None}

    def adopt_replacements(self, infos: Sequence[ValueInfo], now_s: float) -> list[ValueInfo]:
        """Replace entries for which satellites report a later value, or only others. Return values overwritten in
        place, unless a complete index vouches for them.
        """
        unvouched = self.index is None or not self.index.complete
        reported = self.settings_in_box(infos)
        replacements, overwritten = list[ValueInfo](), list[ValueInfo]()
        for info in infos:
            candidates = reported.get(info.key, ())
            later = _replacement_of(info, candidates)
            if later is not None:
                replacements.append(later)
            elif unvouched and any(_overwrites(candidate, info) for candidate in candidates):
                overwritten.append(info)
        self.remove([info.key for info in replacements], is_gone=False)
        if self.index is None:
            self._remember({info.key: info for info in replacements})
        else:
            self._enter(replacements, now_s)
        return overwritten

    def absent(self, keys: Sequence[bytes]) -> bool:
        """Return True if a key is known to be absent."""
        if self._rebuilder is None:
            return False
        known = self.known(keys)
        return any(self._rebuilder.absent(key) for key in keys if key not in known)

    def bytes_by_servers(self) -> dict[int, float] | None:
        return None if self.index is None else self.index.bytes_by_servers()

    def probing(self) -> dict[str, int]:
        figures = {"index_probe_packets": self._prober.questions}
        if self._rebuilder is not None and self.index is not None:
            figures["index_complete"] = int(self.index.complete)
            figures["index_unwritten"] = self.index.unwritten
            figures["index_locked_out"] = int(self.index.locked_out)
            figures["index_written_beside"] = self.index.written_beside
            figures["index_keys_probed"] = self._rebuilder.keys_probed
            figures["index_values_adopted"] = self._rebuilder.values_adopted
        return figures

    def _info(self, key: bytes, info: BlockInfo) -> ValueInfo:
        return ValueInfo(
            key,
            info.chunks,
            self._chunk_size(info),
            info.value_bytes,
            info.value_crc,
            placement_code(info.strategy),
            info.servers,
            (info.slot_moves, info.plane_moves),
        )

    def _chunk_size(self, info: BlockInfo) -> int:
        """Return an entry's chunk size; if unwritten (earlier releases), the default or ours if it fits, else the
        largest.
        """
        if info.chunk_bytes:
            return info.chunk_bytes
        for size in (DEFAULT_CHUNK_BYTES, self._chunk_bytes):
            if max(1, -(-info.value_bytes // size)) == info.chunks:
                return size
        return -(-info.value_bytes // info.chunks)

    def _remember(self, known: dict[bytes, ValueInfo]) -> None:
        now_s = self._prober.now_s()
        self._known.update({key: (info, now_s) for key, info in known.items()})
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _learn_order(self, keys: Sequence[bytes]) -> None:
        for before, key in pairwise(keys):
            self._predecessors.setdefault(key, before)
        self._trim_predecessors()

    def _trim_predecessors(self) -> None:
        while len(self._predecessors) > MAX_KNOWN:
            self._predecessors.popitem(last=False)

    def known(self, keys: Sequence[bytes]) -> dict[bytes, ValueInfo]:
        """Return the infos known without asking satellites."""
        if self.index is None:
            entries = {key: self._known.get(key) for key in keys}
            return {key: known[0] for key, known in entries.items() if known is not None}
        infos = self.index.infos(keys)
        return {key: self._info(key, info) for key, info in zip(keys, infos, strict=True) if info is not None}

    def before(self, key: bytes) -> list[ValueInfo]:
        """Return the known values before ``key`` in its chain, first to last."""
        chain: list[bytes] = []
        parent = self._predecessors.get(key)
        while parent is not None and len(chain) < _MAX_CHAIN:
            chain.append(parent)
            parent = self._predecessors.get(parent)
        if self.index is not None:
            chain += self.index.before(chain[-1] if chain else key, _MAX_CHAIN - len(chain))
        chain.reverse()
        return list(self.known(chain).values()) if chain else []

    def take(self, keys: Sequence[bytes]) -> tuple[dict[bytes, ValueInfo], bool]:
        """Search each key once. Without an index, what ``prefix`` has just found is used up."""
        wanted = list(dict.fromkeys(keys))
        if self.index is not None:
            infos, certain = self.search(wanted)
        else:
            # Keys probed just before by ``prefix`` need not be probed again.
            since_s = self._prober.now_s() - _FRESH_S
            remembered = {key: self._known.pop(key, None) for key in wanted}
            infos = {key: entry[0] for key, entry in remembered.items() if entry is not None and entry[1] >= since_s}
            unknown = [key for key in wanted if key not in infos]
            more, certain = self._prober.search(unknown) if unknown else ({}, True)
            infos.update(more)
        return {key: infos[key] for key in wanted if key in infos}, certain

    def learn_places(self, places: Mapping[bytes, Place]) -> None:
        for key, place in places.items():
            if place.parent is not None:
                self._predecessors[key] = place.parent
        self._trim_predecessors()

    def record_of(self, info: ValueInfo, now_s: float, place: Place | None) -> bytes:
        return b"" if self.index is None else self.index.record_of(info.key, _entry(info, now_s), place)

    def add(self, infos: Sequence[ValueInfo], now_s: float, places: Mapping[bytes, Place], record: bytes = b"") -> None:
        """Enter stored values. ``record``: their journal record, from ``record_of``."""
        if self._rebuilder is None:
            for info in infos:
                self._known.pop(info.key, None)  # it was the entry of the previous value
        elif infos:
            if not (record and self.index is not None and self.index.add_record(record)):
                self._enter(infos, now_s, places, patient=True)
            self._rebuilder.present(info.key for info in infos)

    def _enter(
        self,
        infos: Iterable[ValueInfo],
        now_s: float,
        places: Mapping[bytes, Place] = _NO_PLACES,
        *,
        patient: bool = False,
    ) -> None:
        """Enter values: successive blocks as one record. Only ``patient`` waits for the index's lock."""
        if self.index is None:
            return
        unplaced: dict[bytes, BlockInfo] = {}
        run: dict[bytes, BlockInfo] = {}
        # A run grows as long as each place follows the previous place.
        first, last = Place(0), b""
        for info in infos:
            entry = _entry(info, now_s)
            place = places.get(info.key)
            if place is None:
                unplaced[info.key] = entry
                continue
            if run and place != Place(first.depth + len(run), last):
                self.index.add(list(run), list(run.values()), first.depth, first.parent, patient=patient)
                run = {}
            first = first if run else place
            run[info.key], last = entry, info.key
        if run:
            self.index.add(list(run), list(run.values()), first.depth, first.parent, patient=patient)
        if unplaced:
            self.index.add_unplaced(list(unplaced), list(unplaced.values()), patient=patient)

    def switch(self, old: ValueInfo, new: ValueInfo, now_s: float) -> bool:
        """Replace a copied value's entry; False if it is no longer ``old``."""
        if self.index is None:
            return True
        return self.index.replace(
            old.key,
            lambda entry: self._info(old.key, entry) == old,
            lambda entry: replace(
                entry,
                set_at_s=now_s,
                slot_moves=new.set_moves[0],
                plane_moves=new.set_moves[1],
                strategy=placement_name(new.strategy),
                servers=new.servers,
                chunk_bytes=_size_to_write(new),
            ),
        )

    def remove(self, keys: Sequence[bytes], is_gone: bool = True, patient: bool = False) -> None:
        """Drop entries. ``is_gone`` False: another value may be present."""
        for key in keys:
            self._known.pop(key, None)
        if self.index is not None and self._rebuilder is not None:
            self.index.remove(keys, patient=patient)
            if is_gone:
                self._rebuilder.record_evicted(keys)

    def close(self) -> None:
        if self.index is not None:
            self.index.close()


def _entry(info: ValueInfo, now_s: float) -> BlockInfo:
    return BlockInfo(
        info.chunks,
        info.value_bytes,
        info.value_crc,
        now_s,
        *info.set_moves,
        placement_name(info.strategy),
        info.servers,
        chunk_bytes=_size_to_write(info),
    )


def _size_to_write(info: ValueInfo) -> int:
    return 0 if info.chunk_bytes == DEFAULT_CHUNK_BYTES or info.chunks == 1 else info.chunk_bytes


def _same_setting(info: ValueInfo, other: ValueInfo) -> bool:
    same_chunks = info.chunks == other.chunks == 1 or info.chunk_bytes == other.chunk_bytes
    return (info.value_crc, info.set_moves, same_chunks) == (other.value_crc, other.set_moves, True)


def _overwrites(other: ValueInfo, info: ValueInfo) -> bool:
    same_places = (other.strategy, other.servers, other.set_moves) == (info.strategy, info.servers, info.set_moves)
    return same_places and (other.value_bytes, other.value_crc) != (info.value_bytes, info.value_crc)


def _replacement_of(info: ValueInfo, reported: Sequence[ValueInfo]) -> ValueInfo | None:
    """Return the latest other value reported, if later than ``info``, or ``info`` is not reported; else it is a
    leftover.
    """
    candidates = [candidate for candidate in reported if not _same_setting(info, candidate)]
    if not candidates:
        return None
    latest = max(candidates, key=lambda candidate: sum(candidate.set_moves))
    later = sum(latest.set_moves) > sum(info.set_moves)
    return latest if later or len(candidates) == len(reported) else None


Reach = Literal["now", "nearby", "ever"]
"""Satellites with copies: "now"; "nearby": also before the last move and after the next, which may precede a command's
arrival; "ever": wherever copies may have been left.
"""


class Holders:
    """Satellites of a value's chunks, from its info and the clock."""

    def __init__(self, driver: ClientDriver, sky: SkyMap, replicas: int) -> None:
        self._driver = driver
        self._sky = sky
        self.replicas = replicas

    def shares(self, info: ValueInfo, reach: Reach) -> list[list[SatelliteId]]:
        """Return, per server of the value, the satellites that may have its chunks."""
        machine = self._driver.machine
        with self._driver.lock:
            now_s = self._driver.now_s()
            slot_moves, plane_moves = machine.moves(now_s)
            moves = [(slot_moves, plane_moves)]
            if reach == "nearby":
                moves += [
                    (slot_moves - 1, plane_moves),
                    (slot_moves, plane_moves - 1),
                    (slot_moves + 1, plane_moves),
                    (slot_moves, plane_moves + 1),
                ]
            elif reach == "ever":
                moves = machine.everywhere(info, now_s)
        copies = [
            self._sky.servers_at(info.strategy, info.servers, info.set_moves, at, replica)[: info.chunks]
            for at, replica in product(moves, range(self.replicas))
        ]
        return [list(share) for share in zip(*copies, strict=True)]

    def of(self, info: ValueInfo, reach: Reach) -> dict[SatelliteId, None]:
        return dict.fromkeys(satellite for share in self.shares(info, reach) for satellite in share)

    def chunks_of(self, info: ValueInfo) -> Counter[SatelliteId]:
        counts: Counter[SatelliteId] = Counter()
        for server, share in enumerate(self.shares(info, "now")):
            for satellite in share:
                counts[satellite] += len(range(server, info.chunks, info.servers))
        return counts

    def pages(
        self,
        infos: Iterable[ValueInfo],
        reach: Reach,
        but: Mapping[bytes, Container[SatelliteId]] = NONE_SPARED,
        most: int = MAX_KEYS_PER_PACKET,
    ) -> list[tuple[SatelliteId, list[ValueInfo]]]:
        """Group values by satellite, at most ``most`` (a packet) per group; ``but``: satellites to leave out."""
        by_satellite: dict[SatelliteId, list[ValueInfo]] = {}
        for info in infos:
            spared = but.get(info.key, ())
            for satellite in self.of(info, reach):
                if satellite not in spared:
                    by_satellite.setdefault(satellite, []).append(info)
        return [
            (satellite, values[at : at + most])
            for satellite, values in by_satellite.items()
            for at in range(0, len(values), most)
        ]
