"""Constellation tier: values are cut into chunks on satellites, under the common contract.

A read: ``prefix`` asks the index; ``complete_load`` takes the infos from it (``catalog``), begins a ``get`` of the
client's state machine for each, and the driver runs them together.

A failed read is a miss, but no proof of loss: a chunk may be moving. Only a value with a chunk proved lost
(``protocol.client.transfer``) leaves the index; the rest of it is evicted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.kv.block import Place
from skymemory.kv.value import DEFAULT_CHUNK_BYTES
from skymemory.metrics import SharedCounters
from skymemory.native import Rows
from skymemory.placement.fan_out import FanOut
from skymemory.placement.locate import Moves
from skymemory.protocol.client.machine import Finished
from skymemory.protocol.client.transfer import Striping, ValueInfo, can_hold
from skymemory.protocol.clock import STRATEGY_CODES, SkyMap
from skymemory.protocol.messages import Kept, Retain, pack_retain, pack_setting, unpack_retained
from skymemory.protocol.wire import CHUNK_REF_BYTES, Op
from skymemory.reasons import LOST, UNANSWERED, Miss
from skymemory.store.base import (
    Buffer,
    BufferPool,
    KeyLocks,
    KeyReport,
    LoadReport,
    LoadTicket,
    Places,
    Presence,
    RemoteStore,
    StoreTicket,
    check_ttl,
    value_buffer,
)
from skymemory.store.named_values import NamedValue
from skymemory.store.sky.catalog import Catalog, Holders
from skymemory.store.sky.maintenance import Evictor, Prefetcher
from skymemory.store.sky.probing import (
    ClientDriver,
    Prober,
    ask_all,
    list_names,
    read_answer,
    synchronise_clock,
)
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.units import format_size

_TYPICAL_BYTES = 3e6
# Failures that may be wrong: the value is read again before it is evicted.
_DOUBTFUL = (Miss.CORRUPT, Miss.OTHER_VERSION)
# Failures of writes in words for users; others are words already.
_WORDS = {
    Miss.UNREACHABLE: "none of its satellites can be reached",
    Miss.TIMEOUT: "satellites did not answer in time",
    Miss.OUT_OF_SIGHT: "no satellite for it is in sight",
}

_WIRE_LIMIT_BYTES = (1 << 32) - 1
_MAX_CHUNKS = 1 << 20
_MAX_SERVERS = 64  # limit believed of another writer


@dataclass(frozen=True, slots=True)
class SkySettings:
    """Layout of values. ``memory_per_satellite_bytes`` 0: unknown."""

    strategy: str = "rotation_hop"
    servers: int = 10
    """Satellites per value; with ``fan_out`` at most."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    memory_per_satellite_bytes: int = 0
    lazy_eviction: bool = True
    """True if a reader that finds a chunk lost evicts the rest."""
    replicas: int = 1
    """Copies per chunk, on different satellites (and planes, if possible)."""
    fan_out: FanOut | None = None

    @property
    def strategy_code(self) -> int:
        """Return the number on the wire."""
        code = STRATEGY_CODES.get(self.strategy)  # type: ignore[call-overload]
        if code is None:
            raise InvalidInput(f"strategy {self.strategy!r}: expected one of {', '.join(STRATEGY_CODES)}")
        return int(code)

    @property
    def box_bytes(self) -> float:
        memory_bytes = self.memory_per_satellite_bytes * self.servers / self.replicas
        return memory_bytes or math.inf

    @property
    def largest_value_bytes(self) -> int:
        if not self.memory_per_satellite_bytes:
            return _WIRE_LIMIT_BYTES
        chunks = self.memory_per_satellite_bytes // (self.chunk_bytes + CHUNK_REF_BYTES)
        return min(_WIRE_LIMIT_BYTES, chunks * self.servers * self.chunk_bytes // self.replicas)

    def can_hold(self, chunks: int, chunk_bytes: int, value_bytes: int) -> bool:
        """Return True if a reported value can exist."""
        if not self.memory_per_satellite_bytes:
            return chunks <= _MAX_CHUNKS
        room_bytes = self.memory_per_satellite_bytes * max(self.servers, _MAX_SERVERS)
        return value_bytes + chunks * CHUNK_REF_BYTES <= room_bytes

    def check_size(self, size_bytes: int) -> None:
        if size_bytes > self.largest_value_bytes:
            raise ValueTooLarge(
                f"a value of {format_size(size_bytes)} on {self.servers} satellites of "
                f"{format_size(self.memory_per_satellite_bytes)}: at most {format_size(self.largest_value_bytes)} fit; "
                "use more servers, more memory per satellite or smaller values"
            )


@dataclass(slots=True)
class _Ahead:
    """State before a write: entries of its keys, values before them in the chain; and the new journal record."""

    before: dict[bytes, ValueInfo] = field(default_factory=dict)
    chain: list[ValueInfo] = field(default_factory=list)
    record: bytes = b""


class ConstellationStore(RemoteStore):
    """Store of values on satellites. Without ``index``, every lookup probes the box."""

    def __init__(
        self,
        driver: ClientDriver,
        sky: SkyMap,
        settings: SkySettings | None = None,
        *,
        index: SharedIndex | None = None,
        name: str = "constellation",
    ) -> None:
        super().__init__(name, driver.now_s)
        self.settings = settings or SkySettings()
        self._strategy = strategy = self.settings.strategy_code
        self._driver = driver
        self._sky = sky
        prober = Prober(driver, sky, strategy, self.settings.servers, self.settings.can_hold)
        self._catalog = Catalog(index, prober, self.settings.chunk_bytes)
        if index is not None and self.settings.fan_out is not None:
            index.assume_capacity(self.settings.box_bytes)
        self._buffers = BufferPool()
        self._counters = SharedCounters()
        for name in ("hits", "misses", "stored", "requests", "chunks_retransmitted", "chunks_corrupt"):
            self._counters.add(name, 0)
        self._writing = KeyLocks()
        self._holders = Holders(driver, sky, self.settings.replicas)
        self._evictor = Evictor(driver, self._catalog, self._holders, self._counters)
        self._prefetcher = Prefetcher(driver, sky, self._catalog, self._holders, self._evictor, self._counters)
        self._clock_ahead_s = 0.0

    # --- looking up ---

    def lookup(self, keys: Sequence[bytes]) -> list[Presence]:
        keys = self._check(keys)
        self._process_notices()
        infos = self._catalog.find(keys)
        pending = self._pending()
        return [Presence.PENDING if key in pending else Presence.HIT if key in infos else Presence.MISS for key in keys]

    def prefix(self, keys: Sequence[bytes]) -> int:
        keys = self._check(keys)
        self._process_notices()
        return self._catalog.prefix(keys)

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        keys = self._check(keys)
        self._process_notices()
        infos = self._catalog.find(keys)
        return [infos[key].value_bytes if key in infos else None for key in keys]

    def _process_notices(self) -> None:
        """Remove values reported as evicted from the index, unless set again."""
        if not self._driver.machine.any_gone:
            return
        with self._driver.lock:
            dead = dict(self._driver.machine.take_gone())
        if dead:
            known = self._catalog.known(list(dead))
            removed = [key for key, info in known.items() if pack_setting(info.value_crc, *info.set_moves) == dead[key]]
            self._counters.add("values_gone_by_notice", len(removed))
            self._catalog.remove(removed)

    # --- loading ---

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Lease by an unacknowledged packet."""
        ticket = super().prepare_load(keys)
        self._hint(Retain.LEASE, ticket.expires_s, list(self._catalog.known(ticket.keys).values()))
        return ticket

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        if len(keys) != 1:
            return self.complete_load(super().prepare_load(keys))
        (key,) = self._check(keys)
        self._evictor.pay()
        infos, _ = self._catalog.take((key,))
        value = None if key not in infos else self._get(infos[key])
        self._counters.add("misses" if value is None else "hits")
        return [value]

    def _get(self, info: ValueInfo) -> memoryview | None:
        """Read a single value."""
        size_bytes, started_s = info.value_bytes, self._driver.now_s()
        out = value_buffer(size_bytes)
        outcome = self._driver.read(info, out, self.settings.replicas)
        self._count(outcome)
        if not outcome.ok:
            _, values = self._settle([info], {info.key: out}, {info.key: outcome}, started_s)
            return values.get(info.key)
        self._rate.learn(size_bytes, outcome.report.seconds)
        return out.toreadonly()

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self._check(())
        self._evictor.pay()
        self._loads.take(ticket)
        started_s = self._driver.now_s()
        infos, certain = self._catalog.take(ticket.keys)
        unique = list(infos.values())
        # A key that occurs twice has two destinations: it is read once, into the buffer.
        times = Counter(ticket.keys) if ticket.rows else {}
        wanted = {key: key_rows for key, key_rows in zip(ticket.keys, ticket.rows, strict=False) if times[key] == 1}
        rows = {
            info.key: value_rows
            for info in unique
            if (value_rows := wanted.get(info.key)) is not None and can_hold(value_rows, info.value_bytes)
        }
        buffer = self._buffers.take(sum(info.value_bytes for info in unique if info.key not in rows))
        ticket.state = buffer
        outcomes, values = self._fetch(unique, buffer.data, rows)
        ticket.placed = {
            at: infos[key].value_crc for at, key in enumerate(ticket.keys) if key in rows and key in values
        }
        seconds = self._driver.now_s() - started_s
        silent = Miss.UNCERTAIN if self._driver.machine.breaker.closed else Miss.UNREACHABLE
        absent = KeyReport(reason=Miss.ABSENT if certain else silent)
        reports = [self._key_report(outcomes[key]) if key in outcomes else absent for key in ticket.keys]
        ticket.report = LoadReport(tuple(reports), seconds)
        loaded_bytes = sum(infos[key].value_bytes for key in values)
        self._rate.learn(loaded_bytes, seconds)
        self._counters.add("hits", sum(key in values for key in ticket.keys))
        self._counters.add("misses", sum(key not in values for key in ticket.keys))
        return [values.get(key) for key in ticket.keys]

    def _fetch(
        self, infos: Sequence[ValueInfo], buffer: memoryview, rows: Mapping[bytes, Rows]
    ) -> tuple[dict[bytes, Finished], dict[bytes, memoryview]]:
        """Read values into ``rows``, else ``buffer``; return outcomes and values."""
        outs: dict[bytes, memoryview | Rows] = dict(rows)
        at = 0
        for info in infos:
            if info.key not in rows:
                outs[info.key] = buffer[at : at + info.value_bytes]
                at += info.value_bytes
        looked_s = self._driver.now_s()
        return self._settle(infos, outs, self._read(infos, outs), looked_s)

    def _settle(
        self,
        infos: Sequence[ValueInfo],
        outs: Mapping[bytes, memoryview | Rows],
        outcomes: dict[bytes, Finished],
        looked_s: float,
    ) -> tuple[dict[bytes, Finished], dict[bytes, memoryview]]:
        """Read doubtful values again, evict lost values, adopt replacements; return outcomes and values."""
        doubtful = [
            info for info in infos if (finished := outcomes.get(info.key)) and finished.report.failure in _DOUBTFUL
        ]
        if doubtful:
            self._counters.add("second_looks", len(doubtful))
            outcomes.update(self._read(doubtful, outs))
        values: dict[bytes, memoryview] = {}
        failed: dict[Miss, list[ValueInfo]] = {}
        for info in infos:
            if (outcome := outcomes.get(info.key)) is None:
                continue
            if failure := outcome.report.failure:
                self._counters.add("failures", label=failure)
                failed.setdefault(failure, []).append(info)
            else:
                out = outs[info.key]
                values[info.key] = (out.head if isinstance(out, Rows) else out).toreadonly()
        lost = [info for reason in LOST for info in failed.get(reason, ())]
        if replaced := failed.get(Miss.OTHER_VERSION):
            lost += self._catalog.adopt_replacements(replaced, self._driver.now_s())
        if lost and self.settings.lazy_eviction:
            self._evictor.evict_holed(lost, looked_s)
        elif lost:
            self._catalog.remove([info.key for info in lost])
        return outcomes, values

    def _read(self, infos: Sequence[ValueInfo], outs: Mapping[bytes, memoryview | Rows]) -> dict[bytes, Finished]:
        """Read values concurrently into ``outs``; return the outcomes."""
        driver, machine, replicas = self._driver, self._driver.machine, self.settings.replicas
        if len(infos) == 1:
            finished = [driver.read(infos[0], outs[infos[0].key], replicas)]
        else:
            with driver.lock:
                # Reversed: the first becomes the most recently used, and a chain loses its end first.
                numbers = [machine.get(info, outs[info.key], driver.now_s(), replicas) for info in reversed(infos)]
            finished = list(driver.run(numbers).values())
        for outcome in finished:
            self._count(outcome)
        return {outcome.info.key: outcome for outcome in finished if outcome.info is not None}

    def _count(self, outcome: Finished) -> None:
        report, add = outcome.report, self._counters.add
        add("requests", report.requests)
        if report.retransmitted_chunks:
            add("chunks_retransmitted", report.retransmitted_chunks)
        if report.corrupt_chunks:
            add("chunks_corrupt", report.corrupt_chunks)

    def _key_report(self, outcome: Finished) -> KeyReport:
        report = outcome.report
        if outcome.ok:
            return KeyReport(self._name, report.value_bytes, report.seconds, report.retransmitted_chunks)
        return KeyReport(seconds=report.seconds, retransmitted=report.retransmitted_chunks, reason=report.failure)

    def release(self, ticket: LoadTicket) -> None:
        self._loads.discard(ticket)
        buffer, ticket.state = ticket.state, None
        if isinstance(buffer, np.ndarray):
            self._buffers.give_back(buffer)

    # --- storing ---

    def _check_size(self, size_bytes: int) -> None:
        self.settings.check_size(size_bytes)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self._check(())
        with self._stores.ending(ticket):
            return self._store(ticket)

    def put_many(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> list[bool]:
        ticket, now_s = self._store_ticket(items, places)
        with self._stores.at_once(ticket, now_s):
            return self._store(ticket)

    def _store(self, ticket: StoreTicket) -> list[bool]:
        """Write values, enter them into the index, and evict what they replace."""
        started_s = self._driver.now_s()
        keys = [key for key, _ in ticket.items]
        places = {key: place for (key, _), place in zip(ticket.items, ticket.places, strict=True) if place is not None}
        self._catalog.learn_places(places)
        ahead = _Ahead()
        self._writing.take(keys)  # two threads that write the same key concurrently would leave parts of both
        try:
            finished = self._write(dict(ticket.items), places, ahead)
        finally:
            self._writing.give_back(keys)
        stored = {key: outcome for key, outcome in finished.items() if outcome.ok}
        failed = [outcome.info for outcome in finished.values() if not outcome.ok and outcome.info is not None]
        for outcome in finished.values():
            self._count(outcome)
            if failure := outcome.report.failure:
                self._counters.add("failures", label=failure)
        if failed:
            self._evictor.clean_up_failed(failed, ahead.before)
        infos = [outcome.info for outcome in reversed(stored.values()) if outcome.info is not None]
        self._process_notices()  # about earlier values: they must not remove the new entries
        self._catalog.add(infos, self._driver.now_s(), places, ahead.record)
        if ahead.before:
            self._evictor.evict_replaced(ahead.before, infos)
        # Touch the blocks before the first value of the chain: their successors must not outlive them.
        self._touch(ahead.chain)
        ticket.seconds = self._driver.now_s() - started_s
        ticket.state = sum(outcome.report.retransmitted_chunks for outcome in finished.values())
        ticket.unanswered = frozenset(key for key, outcome in finished.items() if outcome.report.failure in UNANSWERED)
        failures = (outcome.report.failure for outcome in finished.values())
        ticket.reason = next((_WORDS.get(failure, failure) for failure in failures if failure), "")
        self._counters.add("stored", len(stored))
        return [key in stored for key in keys]

    def _write(
        self, items: Mapping[bytes, Buffer], places: Mapping[bytes, Place], ahead: _Ahead
    ) -> dict[bytes, Finished]:
        """Write values concurrently; ``ahead`` gets the state before."""
        driver, settings = self._driver, self.settings
        # Without an index, the fill level of small boxes is unknown.
        bytes_by_servers = self._catalog.bytes_by_servers() if settings.fan_out is not None else None
        # Reversed, as in ``_read``: satellites keep the first block longest.
        stripings = {
            key: Striping(
                settings.chunk_bytes, self._strategy, self._servers_for(value, bytes_by_servers), settings.replicas
            )
            for key, value in reversed([*items.items()])
        }
        if len(items) == 1:
            ((key, striping),) = stripings.items()

            # Called while the packets are in flight: the index does not know of the new value.
            def look_ahead(info: ValueInfo) -> None:
                self._look_up([key], ahead)
                ahead.record = self._catalog.record_of(info, driver.now_s(), places.get(key))

            return {key: driver.write(key, items[key], striping, look_ahead)}
        self._look_up([*items], ahead)
        with driver.lock:
            put, now_s = driver.machine.put, driver.now_s()
            numbers = {key: put(key, items[key], striping, now_s)[0] for key, striping in stripings.items()}
        finished = driver.run(numbers.values())
        return {key: finished[number] for key, number in numbers.items()}

    def _look_up(self, keys: Sequence[bytes], ahead: _Ahead) -> None:
        ahead.before = self._catalog.known(keys)
        ahead.chain = self._catalog.before(keys[0]) if keys else []

    def _servers_for(self, value: Buffer, bytes_by_servers: dict[int, float] | None) -> int:
        """Return a value's number of satellites; ``fan_out`` decides by size and the bytes there."""
        settings = self.settings
        if settings.fan_out is None or bytes_by_servers is None:
            return settings.servers
        size_bytes = memoryview(value).nbytes
        servers = settings.fan_out.servers(max(1, -(-size_bytes // settings.chunk_bytes)), size_bytes, bytes_by_servers)
        bytes_by_servers[servers] = bytes_by_servers.get(servers, 0.0) + size_bytes
        return servers

    def prefetch(self, keys: Sequence[bytes], at: float, *, moves: Moves | None = None) -> list[bool]:
        """Copy parked values (``hop``, ``baseline``) to the satellites overhead at ``at`` (Unix seconds); with
        ``moves`` (the box of another place) all values.
        """
        return self._prefetcher.run(self._check(keys), at, moves)

    # --- the rest of the contract ---

    def touch(self, keys: Sequence[bytes]) -> None:
        infos = self._catalog.find(self._check(keys))
        self._touch([infos[key] for key in dict.fromkeys(keys) if key in infos])

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Pin values; True if all their satellites promise."""
        keys, until_s = self._check(keys), self._driver.now_s() + ttl_s if check_ttl(ttl_s) > 0 else 0.0
        infos = self._catalog.find(keys)
        promised = self._retain(Retain.PIN, until_s, list(infos.values()))
        refused = [info for info in infos.values() if not promised[info.key]]
        if refused and ttl_s > 0:  # one satellite refused: unpin on the others
            self._retain(Retain.PIN, 0.0, refused)
        return [promised.get(key, False) for key in keys]

    def expire(self, keys: Sequence[bytes], ttl_s: float) -> list[bool]:
        """Expire values. True if all their satellites promise."""
        keys = self._check(keys)
        until_s = 0.0 if math.isinf(check_ttl(ttl_s)) else max(self._driver.now_s() + ttl_s, 0.001)
        promised = self._retain(Retain.EXPIRE, until_s, list(self._catalog.find(keys).values()))
        return [promised.get(key, False) for key in keys]

    def _touch(self, infos: Sequence[ValueInfo]) -> None:
        self._hint(Retain.TOUCH, 0.0, infos, last_first=True)

    def _hint(self, what: Retain, until_s: float, infos: Sequence[ValueInfo], last_first: bool = False) -> None:
        """Send a RETAIN to the values' satellites, not waiting for answers."""
        if not infos:
            return
        machine, now_s = self._driver.machine, self._driver.now_s()
        pages = self._holders.pages(infos, "now")
        with self._driver.lock:
            for satellite, page in reversed(pages) if last_first else pages:
                body = pack_retain(what, until_s, [info.key for info in page])
                machine.cancel(machine.ask(Op.RETAIN, body, satellite, now_s))
        self._driver.run(())

    def _retain(self, what: Retain, until_s: float, infos: Sequence[ValueInfo]) -> dict[bytes, bool]:
        """Send a RETAIN to the values' satellites; True per key if all promise it."""
        promised = {info.key: True for info in infos}
        pages = [(at, [info.key for info in page]) for at, page in self._holders.pages(infos, "now")]
        retains = [(at, pack_retain(what, until_s, page), page) for at, page in pages]
        for page, answer in ask_all(self._driver, Op.RETAIN, retains):
            outcomes = read_answer(self._driver, answer, unpack_retained)
            for at, key in enumerate(page):
                promised[key] = promised[key] and at < len(outcomes) and outcomes[at] is Kept.DONE
        return promised

    def delete(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Delete values. None: delete it again."""
        keys = self._check(keys)
        with self._writing.exclusive(keys):
            infos, certain = self._catalog.search(keys)
            deleted = self._evictor.delete(list(infos.values()))
        absent = False if certain else None
        return [(True if key in deleted else None) if key in infos else absent for key in keys]

    def synchronise(self) -> bool:
        """Ask satellites for the box's moves; True if any answered."""
        ahead_s = synchronise_clock(self._driver, self._sky)
        self._clock_ahead_s = ahead_s or 0.0
        return ahead_s is not None

    def names(self) -> list[NamedValue]:
        with self._driver.lock:
            moves = self._driver.machine.moves(self._driver.now_s())
        return list_names(self._driver, self._sky.displaced_boxes(self._strategy, self.settings.servers, moves))

    def stats(self) -> dict[str, int | float]:
        self._owner.check()
        figures: dict[str, int | float] = {
            **self._counters.as_dict(),
            **{f"client_{k}": v for k, v in self._driver.machine.counters.as_dict().items()},
        }
        figures["breaker_open"] = int(not self._driver.machine.breaker.closed)
        figures["satellites_ahead_s"] = self._clock_ahead_s
        figures.update(self._catalog.probing())
        if self._catalog.index is not None:
            figures["values"] = len(self._catalog.index)
        return figures

    def estimate_load_s(self, keys: Sequence[bytes], now_s: float) -> float:
        """Estimate the seconds: a round trip and the bytes at the recent rate; infinite if a key is known to be
        absent.
        """
        # No satellite is asked. Keys that the index lacks (without an index, all) count as present, of typical size.
        keys = self._check(keys)
        farthest_s = self._driver.machine.config.expected_rtt_s
        if self._catalog.absent(keys):
            return math.inf
        infos = self._catalog.known(keys) if self._catalog.index is not None else {}
        # The round trip is to the farthest satellite; with ``fan_out``, values on few servers are nearer.
        boxes_s = self.settings.fan_out.round_trips_s if self.settings.fan_out is not None else {}
        rtts_s = (boxes_s.get(infos[key].servers, farthest_s) if key in infos else farthest_s for key in keys)
        rtt_s = max(rtts_s, default=farthest_s)
        sizes = [infos[key].value_bytes if key in infos else _TYPICAL_BYTES for key in keys]
        return rtt_s + sum(sizes) / self._rate.bytes_per_s

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._driver.close()
            self._catalog.close()
