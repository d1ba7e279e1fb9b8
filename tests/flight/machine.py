"""The satellite in C behind the interface of ``SatelliteMachine``, for the simulated transport and for comparison.

``FlightMachine`` takes the arguments of ``SatelliteMachine`` and is used in its place (``SimulatedConstellation``'s
``machine``). The library is compiled once from ``flight/core`` and ``shim.c``, into ``build/flight/tests``.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.flight.daemon import build_lock

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.keys import KeyRing, SecretKey
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.auth import Authority
from skymemory.protocol.clock import MoveClock, SkyMap
from skymemory.protocol.messages import HOUSEKEEPING_FIELDS
from skymemory.protocol.satellite.memory import CAUSES, StoredChunk
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.satellite.state import SatelliteConfig
from skymemory.protocol.wire import Buffer, LinkEnd, SegmentBatch

ROOT = Path(__file__).parents[2]
CORE = ROOT / "flight" / "core"
BUILDS = ROOT / "build"
NEVER_US = (1 << 63) - 1
PARTS = ("moves", "counters", "figures", "chunks", "promises", "order", "links", "outbox", "history")
"""Parts of the state, as ``sky_state`` numbers them."""

BOUNDS = (
    *("departures", "questions", "subjects", "asked", "suspects", "leases", "expiries", "evicted", "conflicts"),
    *("outbox_bytes", "runs", "transfers", "ground_hosts", "back_offs", "postponed_bytes", "chunks", "keys"),
    "hash_seed",
)
"""Bounds of the pools (and the seed of hashes), as ``shim.c`` numbers them; 0: the default."""

_STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
_BEAM = 0xFF000000
_MOST_RUNS = 4096
_RUN = 1024
"""Chunks of one run at most: where not all are free, C stores them one by one, and may evict others than Python."""
_OUT_BYTES = 1 << 26
_REPLACEMENTS = ("lru", "lfuda", "lrfu")
_LEAST_US = -(1 << 61)
_Counted = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))


def compiler() -> str:
    """The C compiler; the test is skipped where there is none."""
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if not found:
        pytest.skip("no C compiler: the satellite in C is not tested")
    return found


def build() -> Path:
    """The core, as ``make -C flight core`` compiles it, and the shim: one library, compiled where a source is newer.

    ``FLIGHT_SANITIZE=1`` compiles both with ASan and UBSan; then ``LD_PRELOAD`` must name the compiler's libasan.
    """
    with build_lock():
        return _build()


def _build() -> Path:
    cc, sanitize = compiler(), bool(os.environ.get("FLIGHT_SANITIZE"))
    extra = ("SANITIZE=1",) if sanitize else ()
    _run(("make", "-s", "-j2", "-C", str(ROOT / "flight"), "core", f"CC={cc}", *extra))
    folder = BUILDS / ("flight-sanitized" if sanitize else "flight")
    objects = [folder / path.relative_to(ROOT / "flight").with_suffix(".o") for path in sorted(CORE.glob("**/*.c"))]
    shim, made = Path(__file__).with_name("shim.c"), folder / "tests" / "libflight.so"
    newest_s = max(path.stat().st_mtime for path in (shim, *objects, *CORE.glob("**/*.h")))
    if not made.exists() or made.stat().st_mtime < newest_s:
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        options = (*_STRICT, "-O2", "-fPIC", "-shared", f"-I{CORE}", "-o", str(part))
        checked = (
            ("-g", "-DSKY_ADDRESS_SANITIZER", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
            if sanitize
            else ()
        )
        _run((cc, *options, *checked, str(shim), *map(str, objects), "-lm"))
        part.replace(made)
    return made


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The compiled core, with the types of its functions."""
    lib = ctypes.CDLL(str(build()))
    u8, i64, u32, size = ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint32, ctypes.c_size_t
    it, void = ctypes.c_void_p, None
    numbers, buffer = ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p
    types: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "sky_receive": (void, (it, buffer, size, size, u32, i64)),
        "sky_next_timer": (i64, (it,)),
        "sky_handle_timer": (void, (it, i64)),
        "sky_is_late": (ctypes.c_bool, (it, i64)),
        "sky_wants_work": (ctypes.c_bool, (it,)),
        "sky_work": (size, (it, i64)),
        "sky_greet": (void, (it, i64)),
        "sky_gather": (void, (it, i64)),
        "sky_set_backlog": (void, (it, ctypes.c_uint64)),
        "sky_set_figure": (void, (it, ctypes.c_uint, i64)),
        "sky_housekeeping": (void, (it, numbers, i64)),
        "sky_digest": (u32, (it,)),
        "sky_neighbour_used": (void, (it, u32, i64)),
        "sky_neighbour_heard": (void, (it, u32, i64)),
        "shim_error": (u8, (numbers,)),
        "shim_bytes": (size, (numbers,)),
        "shim_shared": (ctypes.c_int, (numbers,)),
        "shim_begin": (it, (numbers, numbers, u8, u32, it, i64, ctypes.POINTER(it))),
        "shim_end": (void, (it,)),
        "shim_set_keys": (void, (it, numbers, u8, u32)),
        "shim_set_lateness": (void, (it, i64, i64, i64)),
        "shim_late": (i64, (it, i64)),
        "sky_host_late": (void, (it, i64, i64)),
        "shim_take": (u32, (it, buffer, size, numbers, u32)),
        "shim_value": (i64, (it, u32)),
        "shim_counter": (i64, (it, u32)),
        "shim_counter_name": (u8, (u32,)),
        "shim_ledger": (void, (it, ctypes.POINTER(ctypes.c_uint64), ctypes.c_bool)),
        "shim_state": (size, (it, u32, buffer, size)),
        "shim_chunk": (i64, (it, u8, u32, buffer, buffer)),
        "shim_indices": (u32, (it, u8, buffer, u32)),
        "shim_put": (ctypes.c_int, (it, u8, u8, u32)),
        "shim_remove": (ctypes.c_int, (it, u8, u32)),
        "shim_evict": (ctypes.c_int, (it, u8, u32)),
        "shim_bucket": (i64, (it, u8, u32)),
        "shim_longest_chain": (u32, (it,)),
        "shim_set_limit": (void, (it, ctypes.c_uint64)),
        "shim_remove_key": (u32, (it, u8)),
        "shim_promises": (void, (it, u8, numbers)),
        "shim_is_up": (ctypes.c_int, (it, u32, u32)),
    }
    for name, (result, arguments) in types.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@lru_cache(maxsize=1)
def counter_names() -> dict[str, int]:
    names: dict[str, int] = {}
    while (name := library().shim_counter_name(len(names))) is not None:
        names[name.decode()] = len(names)
    return names


@lru_cache(maxsize=1)
def _scratch() -> tuple[Any, Any]:
    """Room for what a satellite sends: pages that nothing has filled cost nothing."""
    return (ctypes.c_uint8 * _OUT_BYTES)(), (ctypes.c_int64 * (4 * _MOST_RUNS))()


def us(time_s: float) -> int:
    """Whole microseconds, as C counts."""
    if math.isinf(time_s):
        return NEVER_US if time_s > 0 else _LEAST_US
    return round(time_s * 1e6)


def us_from(time_s: float) -> int:
    """The first whole microsecond that is not before ``time_s``."""
    found = us(time_s)
    while found / 1e6 < time_s:
        found += 1
    while (found - 1) / 1e6 >= time_s:
        found -= 1
    return found


def packed(satellite: SatelliteId) -> int:
    return satellite.plane << 12 | satellite.slot


def settings_of(
    config: SatelliteConfig, sky: SkyMap, clock: MoveClock, bounds: Mapping[str, int] = MappingProxyType({})
) -> list[int]:
    """The configuration as ``shim_begin`` takes it."""
    eviction, torus = config.eviction, sky.torus
    slot_s, plane_s = sky._links_s
    return [
        packed(config.address),
        torus.planes,
        torus.slots_per_plane,
        int(config.routing == "alternate"),
        config.memory_bytes,
        min(config.memory_bytes // 73 + 1 + _RUN, 1 << 18),
        _REPLACEMENTS.index(config.replacement),
        config.credit_bytes,
        config.max_backlog_bytes,
        1 << 24,
        eviction.gossip,
        eviction.plane_only,
        eviction.periodic,
        eviction.migration,
        us(eviction.sweep_s),
        us(eviction.notice_hold_s),
        us(eviction.confirm_s),
        round(eviction.pin_share * 65536),
        eviction.replicas,
        sky.centre.plane,
        sky.centre.slot,
        round(slot_s * 1e12),
        round(plane_s * 1e12),
        *clock.pushed,
        us(config.neighbour_timeout_s),
        config.handover_window_bursts,
        us(config.handover_timeout_s),
        us(config.handover_grace_s),
        us(config.handover_gap_s),
        _auth(config.authority),
        *(bounds.get(name, 0) for name in BOUNDS),
        torus.seam,
        torus.most_planes,
        torus.most_slots,
        len(torus.gaps),
        *sorted(map(torus.index, torus.gaps)),
    ]


def _auth(authority: Authority | None) -> int:
    """As in config.h."""
    if authority is None:
        return 0
    return 2 if authority.every_packet else int(authority.signed_answers)


def _keys(ring: Sequence[SecretKey]) -> tuple[Any, bytes]:
    """Numbers and times of keys, and their secrets."""
    numbers = [number for key in ring for number in (key.key_id, us(key.from_s))]
    return (ctypes.c_int64 * max(1, len(numbers)))(*numbers), b"".join(key.secret for key in ring)


def _callback(clock: MoveClock) -> Any:
    """The clock as C asks it: what it counts without what operators add, and when it next changes."""

    def counted(now_us: int, found: Any) -> None:
        now_s = now_us / 1e6
        moves, next_s = clock.moves(now_s), clock.next_move_s(now_s)
        found[0], found[1] = moves[0] - clock.pushed[0], moves[1] - clock.pushed[1]
        found[2] = NEVER_US if next_s is None or math.isinf(next_s) else us_from(next_s)

    return _Counted(counted)


class FlightMachine:
    """One satellite in C, with the interface of ``SatelliteMachine``."""

    def __init__(
        self,
        config: SatelliteConfig,
        sky: SkyMap,
        clock: MoveClock,
        now_s: float,
        lateness: Lateness | None = None,
        transport_figures: Callable[[], dict[str, int]] = dict,
        bounds: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """``bounds``: of pools, by their names in ``BOUNDS``."""
        assert set(bounds) <= set(BOUNDS), bounds
        self.lib = library()
        self.config = config
        self.lateness = lateness or Lateness()
        self.backlog_bytes = 0
        self._figures = transport_figures
        self._passed_late = (0.0, -math.inf, math.inf)
        self._clock = _callback(clock) if clock.time_scale > 0 else None
        values = settings_of(config, sky, clock, bounds)
        numbers = (ctypes.c_int64 * len(values))(*values)
        ring = config.authority.ring.keys if config.authority is not None else ()
        keys, secrets = _keys(ring)
        callback = None if self._clock is None else ctypes.cast(self._clock, ctypes.c_void_p)
        mapping = ctypes.c_void_p()
        it = self.lib.shim_begin(numbers, keys, secrets, len(ring), callback, us(now_s), ctypes.byref(mapping))
        if not it:
            error = self.lib.shim_error(numbers)
            raise ValueError(error.decode() if error else "the satellite does not begin")
        self.it = it
        self.settings = numbers
        self._finalizer = weakref.finalize(self, self.lib.shim_end, mapping)
        self._tokens: dict[LinkEnd, int] = {}
        self._links: dict[int, LinkEnd] = {}
        """Ground hosts' tokens, and all links by number."""
        self._inputs: list[Any] = []
        """What came, since packets in transit leave from there."""
        self.counters = FlightCounters(self)
        self.store = FlightStore(self)
        self.handover = FlightHandover(self)
        self.neighbours = FlightNeighbours(self)

    def set_keys(self, ring: KeyRing) -> None:
        """As a host whose key file has changed."""
        keys, secrets = _keys(ring.keys)
        self.lib.shim_set_keys(self.it, keys, secrets, len(ring.keys))

    def value(self, which: int) -> int:
        return int(self.lib.shim_value(self.it, which))

    def link(self, end: LinkEnd) -> int:
        """The number of a link by its other end."""
        if isinstance(end, SatelliteId):
            number = packed(end)
        elif (known := self._tokens.get(end)) is not None:
            number = known
        else:
            number = self._tokens[end] = _BEAM | (len(self._tokens) + 1)
        self._links.setdefault(number, end)
        return number

    def end_of(self, link: int) -> LinkEnd:
        found = self._links.get(link)
        return SatelliteId(link >> 12, link & 0xFFF) if found is None else found

    def _pass_figures(self) -> None:
        """What only the caller knows: how late the host is, and what waits there."""
        late = self.lateness
        passed = late._longest_wait_s, late._longest_wait_at_s, late._on_time_s
        if passed != self._passed_late:
            self._passed_late = passed
            self.lib.shim_set_lateness(self.it, *map(us, passed))
        self.lib.sky_set_backlog(self.it, self.backlog_bytes)
        if self._figures is not dict:
            for name, value in self._figures().items():
                self.lib.sky_set_figure(self.it, HOUSEKEEPING_FIELDS.index(name), value)

    @property
    def moves(self) -> Moves:
        return self.value(14), self.value(15)

    @property
    def hidden_work(self) -> tuple[int, int, int]:
        return self.value(9), self.value(7), self.value(10)

    def receive_batch(self, data: Buffer, segment_bytes: int, source: LinkEnd, now_s: float) -> None:
        self._pass_figures()
        size = len(data)
        buffer = (ctypes.c_uint8 * max(1, size)).from_buffer_copy(bytes(data) or b"\0")
        self._inputs.append(buffer)
        self.lib.sky_receive(self.it, buffer, size, segment_bytes, self.link(source), us(now_s))

    def receive_runs(self, runs: list[native.Run], source: LinkEnd, now_s: float) -> None:
        for view, segment_bytes in runs:
            self.receive_batch(view, segment_bytes, source, now_s)

    def datagrams_to_send(self, now_s: float) -> list[tuple[SegmentBatch, LinkEnd]]:
        self._pass_figures()
        out, runs = _scratch()
        self.lib.sky_gather(self.it, us(now_s))
        count = self.lib.shim_take(self.it, out, _OUT_BYTES, runs, _MOST_RUNS)
        self._inputs.clear()
        at, batches = 0, []
        view = memoryview(out).cast("B")
        for link, _, size, total in zip(*[iter(runs[: 4 * count])] * 4, strict=True):
            batches.append((SegmentBatch(bytes(view[at : at + total]), size), self.end_of(link)))
            at += total
        return batches

    @property
    def wants_to_send(self) -> bool:
        return self.value(17) > 0

    def next_timer_s(self) -> float | None:
        found = self.lib.sky_next_timer(self.it)
        return None if found >= NEVER_US else found / 1e6

    def handle_timer(self, now_s: float) -> None:
        self._pass_figures()
        self.lib.sky_handle_timer(self.it, us(now_s))

    @property
    def wants_work(self) -> bool:
        return bool(self.lib.sky_wants_work(self.it))

    def work(self, now_s: float) -> native.Run | None:
        """The transport counts the packets that are processed; here only their bytes are known."""
        self._pass_figures()
        size = int(self.lib.sky_work(self.it, us(now_s)))
        return (memoryview(bytes(size)), size) if size else None

    def plain_requests(self, now_s: float) -> None:
        """None: all packets go through the machine."""

    def routes(self, now_s: float) -> None:
        """None: likewise."""

    def housekeeping(self) -> dict[str, int]:
        self._pass_figures()
        figures = (ctypes.c_int64 * len(HOUSEKEEPING_FIELDS))()
        self.lib.sky_housekeeping(self.it, figures, 0)
        return self.counters.as_dict() | dict(zip(HOUSEKEEPING_FIELDS, figures, strict=True))

    def state(self, part: int) -> bytes:
        """One of ``PARTS`` as bytes."""
        out, _ = _scratch()
        size = int(self.lib.shim_state(self.it, part, out, _OUT_BYTES))
        assert size <= _OUT_BYTES, "a state larger than the room for it"
        return bytes(memoryview(out).cast("B")[:size])

    def digest(self) -> int:
        return int(self.lib.sky_digest(self.it))


class FlightCounters(Counters):
    """The counters of C, and those that a transport adds to by itself (``packets_blocked``)."""

    def __init__(self, machine: FlightMachine) -> None:
        super().__init__()
        self._machine = machine

    def get(self, name: str, label: str = "") -> int:
        number = counter_names().get(name)
        mine = 0 if number is None else int(self._machine.lib.shim_counter(self._machine.it, number))
        return mine + super().get(name, label)

    def total(self, name: str) -> int:
        return self.get(name)

    def as_dict(self) -> dict[str, int]:
        counted = {name: self.get(name) for name in counter_names()}
        return super().as_dict() | {name: value for name, value in counted.items() if value}


class FlightLedger:
    """The account of bytes of one satellite."""

    def __init__(self, machine: FlightMachine) -> None:
        self._machine = machine

    def values(self) -> list[int]:
        found = (ctypes.c_uint64 * 7)()
        self._machine.lib.shim_ledger(self._machine.it, found, False)
        return list(found)

    def set(self, values: list[int]) -> None:
        self._machine.lib.shim_ledger(self._machine.it, (ctypes.c_uint64 * 7)(*values), True)

    def record_removed(self, size_bytes: int, cause: str) -> None:
        values = self.values()
        values[2 + CAUSES.index(cause)] += size_bytes  # type: ignore[arg-type]
        self.set(values)

    def figures(self) -> dict[str, int]:
        names = ("set", "migrated_in", *CAUSES)
        return {f"bytes_{name}": value for name, value in zip(names, self.values(), strict=True)}


class _Promises(Mapping[bytes, float]):
    """Pins, or expiries: keys, and until when."""

    def __init__(self, store: FlightStore, which: int) -> None:
        self._store, self._which = store, which

    def __getitem__(self, key: bytes) -> float:
        until_us = self._store.promises(key)[self._which]
        if not until_us:
            raise KeyError(key)
        return until_us / 1e6

    def __iter__(self) -> Iterator[bytes]:
        return (key for key in self._store.order() if self._store.promises(key)[self._which])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Shares(Mapping[bytes, dict[int, tuple[bytes, bytes]]]):
    """All chunks, by key and index: read from C when they are asked for."""

    def __init__(self, store: FlightStore) -> None:
        self._store = store

    def __getitem__(self, key: bytes) -> dict[int, tuple[bytes, bytes]]:
        found = {index: chunk for index in self._store.indices(key) if (chunk := self._store.peek((key, index)))}
        if not found:
            raise KeyError(key)
        return {index: (chunk.ref, chunk.payload) for index, chunk in found.items()}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._store.keys())

    def __len__(self) -> int:
        return len(self._store.keys())


class FlightStore:
    """The memory of a satellite in C, as far as tests and transports look into it."""

    def __init__(self, machine: FlightMachine) -> None:
        self._machine = machine
        self._ledger = FlightLedger(machine)
        self.shares = _Shares(self)
        self.pins = _Promises(self, 0)
        self.expiries = _Promises(self, 1)
        self.leases = _Promises(self, 2)

    used_bytes = property(lambda self: self._machine.value(0))

    @property
    def limit_bytes(self) -> int:
        return int(self._machine.value(1))

    @limit_bytes.setter
    def limit_bytes(self, size_bytes: int) -> None:
        self._machine.lib.shim_set_limit(self._machine.it, size_bytes)

    pinned_bytes = property(lambda self: self._machine.value(2))
    leased_bytes = property(lambda self: self._machine.value(3))

    def __len__(self) -> int:
        return int(self._machine.value(4))

    @property
    def ledger(self) -> Any:
        return self._ledger

    @ledger.setter
    def ledger(self, other: Any) -> None:
        self._ledger.set(list(other.figures().values()))

    def keys(self) -> list[bytes]:
        """All keys, ascending."""
        return sorted(self.order())

    def order(self) -> list[bytes]:
        order = self._machine.state(PARTS.index("order"))
        return [order[at : at + 32] for at in range(0, len(order), 32)]

    def keys_after(self, after: bytes, limit: int) -> list[bytes]:
        return [key for key in self.keys() if key > after][:limit]

    def indices(self, key: bytes) -> list[int]:
        found = (ctypes.c_uint32 * max(1, len(self)))()
        count = self._machine.lib.shim_indices(self._machine.it, key, found, len(found))
        return list(found[:count])

    def promises(self, key: bytes) -> list[int]:
        found = (ctypes.c_int64 * 3)()
        self._machine.lib.shim_promises(self._machine.it, key, found)
        return list(found)

    def peek(self, name: tuple[bytes, int]) -> StoredChunk | None:
        ref, payload = ctypes.create_string_buffer(72), ctypes.create_string_buffer(65_536)
        size = self._machine.lib.shim_chunk(self._machine.it, name[0], name[1], ref, payload)
        return None if size < 0 else StoredChunk(ref.raw[:72], payload.raw[:size])

    def items(self) -> Iterator[tuple[tuple[bytes, int], StoredChunk]]:
        for key in self.order():
            for index in reversed(self.indices(key)):
                chunk = self.peek((key, index))
                assert chunk is not None
                yield (key, index), chunk

    def put(self, name: tuple[bytes, int], ref: bytes, payload: bytes) -> bool:
        return bool(self._machine.lib.shim_put(self._machine.it, ref, payload, len(payload)))

    def remove(self, name: tuple[bytes, int]) -> bool:
        return bool(self._machine.lib.shim_remove(self._machine.it, name[0], name[1]))

    def _evict(self, victim: tuple[bytes, int]) -> None:
        self._machine.lib.shim_evict(self._machine.it, victim[0], victim[1])

    def remove_key(self, key: bytes) -> int:
        return int(self._machine.lib.shim_remove_key(self._machine.it, key))


class FlightHandover:
    def __init__(self, machine: FlightMachine) -> None:
        self._machine = machine

    idle = property(lambda self: bool(self._machine.value(5)))
    at_rest = property(lambda self: bool(self._machine.value(6)))
    chunks_planned = property(lambda self: self._machine.value(7))
    retransmitted = property(lambda self: self._machine.value(8))


class _LinkState:
    def __init__(self, machine: FlightMachine) -> None:
        self._machine = machine

    clear = property(lambda self: bool(self._machine.value(16)))
    satellites_searched = property(lambda self: self._machine.value(9))

    def is_up(self, here: SatelliteId, neighbour: SatelliteId) -> bool:
        return bool(self._machine.lib.shim_is_up(self._machine.it, packed(here), packed(neighbour)))


class FlightNeighbours:
    def __init__(self, machine: FlightMachine) -> None:
        self._machine = machine
        self.links = _LinkState(self._machine)

    pushed_at_ms = property(lambda self: self._machine.value(11))

    @property
    def pushed(self) -> Moves:
        return self._machine.value(12), self._machine.value(13)

    def greet(self, now_s: float) -> None:
        self._machine._pass_figures()
        self._machine.lib.sky_greet(self._machine.it, us(now_s))

    def on_packet_sent(self, link: LinkEnd, now_s: float) -> None:
        self._machine.lib.sky_neighbour_used(self._machine.it, self._machine.link(link), us(now_s))

    def on_packet_received(self, neighbour: SatelliteId, now_s: float) -> None:
        self._machine.lib.sky_neighbour_heard(self._machine.it, packed(neighbour), us(now_s))
