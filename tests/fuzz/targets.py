"""What is fuzzed, one input at a time: whatever comes, no exception but the protocol's own, and no promise broken."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import zlib
from collections.abc import Callable

from tests.fuzz.engine_targets import EventsTarget, metrics
from tests.fuzz.grpc_target import GrpcTarget
from tests.fuzz.mutations import mutate, resealed
from tests.fuzz.resp_target import RespTarget
from tests.properties.wire_traffic import (
    CHUNK_BYTES,
    GROUND,
    HERE,
    KEY,
    MEMORY_BYTES,
    NEIGHBOUR,
    SKY_MAP,
    SOUND,
    VALUE,
    bulk,
    check_store,
    satellite,
)
from tests.protocol.satellite import ledgers

from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.index.journal import Record, RecordOp, decode_records, encode_record, replay
from skymemory.index.radix import BlockInfo, RadixIndex
from skymemory.protocol import messages
from skymemory.protocol.client.machine import ClientConfig, ClientMachine
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import MoveClock
from skymemory.protocol.messages import Capabilities, Selection
from skymemory.protocol.wire import ChunkRef, Op, SkyHeader, parse_header, parse_packet
from skymemory.testbed.plan import make_plan
from skymemory.testbed.plan_file import from_json, to_json

Target = Callable[[random.Random], None]
_UNPACKERS: tuple[Callable[[bytes], object], ...] = (
    messages.unpack_keys,
    messages.unpack_presences,
    messages.unpack_listed,
    messages.unpack_list,
    messages.unpack_moves,
    messages.unpack_count,
    messages.unpack_housekeeping,
    Selection.unpack,
    ChunkRef.unpack,
    SkyHeader.unpack,
    parse_packet,
    parse_header,
    Capabilities.unpack_unsupported,
)
_TRAFFIC = [*SOUND, *bulk(Op.SET, servers=9), *bulk(Op.MIGRATE)]
_ANSWERS = [*bulk(Op.DATA, 2), *bulk(Op.DATA, 1), *SOUND]
_LIFE = 64
_MOST_S = 15.0
"""Virtual seconds within which every operation ends."""
"""Inputs to one machine before it is checked and another takes its place."""


def packet_of(dice: random.Random, corpus: list[bytes]) -> bytes:
    """A sound packet, or a mutant, mostly with its checksums made right again."""
    packet = dice.choice(corpus)
    if dice.random() < 0.1:
        return packet
    packet = mutate(dice, packet, corpus)
    return resealed(packet) if dice.random() < 0.8 else packet


def _batch(dice: random.Random, corpus: list[bytes]) -> tuple[bytes, int]:
    """One packet, or several that receive offload joined, by a segment length that is mostly right."""
    packets = [packet_of(dice, corpus) for _ in range(1 if dice.random() < 0.7 else dice.randint(2, 5))]
    data = b"".join(packets)
    return data, len(packets[0]) if dice.random() < 0.9 else dice.randint(-1, 700)


class SatelliteTarget:
    """Memory within its budget, every chunk what it says it is, the books closed."""

    def __init__(self) -> None:
        self._machine, self._left, self._now_s = satellite(), _LIFE, 0.0

    def __call__(self, dice: random.Random) -> None:
        machine = self._machine
        data, segment_bytes = _batch(dice, _TRAFFIC)
        machine.receive_batch(data, segment_bytes, GROUND if dice.random() < 0.7 else NEIGHBOUR, self._now_s)
        for batch, _ in machine.datagrams_to_send(self._now_s):
            assert len(batch.datagrams()) == batch.count
        if dice.random() < 0.1:
            self._now_s += dice.choice((0.001, 0.1, 1.1, 11.0))
            machine.handle_timer(self._now_s)
        self._left -= 1
        if not self._left:
            check_store(machine, honest=False)
            assert ledgers.unaccounted_bytes(machine.housekeeping()) == 0
            assert machine.store.used_bytes <= MEMORY_BYTES
            self.__init__()  # type: ignore[misc]


class ClientTarget:
    """A read that ends well has the right bytes, whatever was sent in between; every operation ends."""

    def __init__(self) -> None:
        self._machine = ClientMachine(ClientConfig(ground=7), SKY_MAP, MoveClock())
        self._out = bytearray(len(VALUE))
        self._left, self._now_s = _LIFE, 0.0
        _, info = self._machine.put(KEY, VALUE, Striping(CHUNK_BYTES, 3, 1), 0.0)
        self._machine.datagrams_to_send(0.0)
        self._read = self._machine.get(info, memoryview(self._out), 0.0)
        self._machine.datagrams_to_send(0.0)
        for op in (Op.HAS, Op.PING, Op.LIST):
            self._machine.ask(op, messages.pack_keys([KEY]) if op is Op.HAS else b"", HERE, 0.0)
        self._machine.datagrams_to_send(0.0)

    def __call__(self, dice: random.Random) -> None:
        machine = self._machine
        data, segment_bytes = _batch(dice, _ANSWERS)
        machine.receive_batch(data, segment_bytes, self._now_s)
        machine.datagrams_to_send(self._now_s)
        if dice.random() < 0.1:
            self._now_s += dice.choice((0.001, 0.03, 0.1))
            machine.handle_timer(self._now_s)
        self._left -= 1
        if not self._left:
            self._end()
            self.__init__()  # type: ignore[misc]

    def _end(self) -> None:
        """Pings of the machine's own go on for as long as a satellite is silent: no operation waits for them."""
        machine, last_s = self._machine, self._now_s + _MOST_S
        ended = 0
        while ended < 5 and self._now_s < last_s:
            machine.datagrams_to_send(self._now_s)
            while (event := machine.next_event()) is not None:
                ended += 1
                assert event.number != self._read or not event.ok or self._out == VALUE, "wrong bytes"
            if ended < 5:
                due_s = machine.next_timer_s()
                assert due_s is not None, "an operation has neither ended nor a timer"
                self._now_s = max(self._now_s, due_s)
                machine.handle_timer(self._now_s)
        assert ended == 5, "an operation never ends"


def bodies(dice: random.Random) -> None:
    """Every reader of a body or a packet either reads or says ``MalformedPacket``."""
    packet = packet_of(dice, _TRAFFIC)
    body = packet[dice.choice((0, 8, 16, 52, 60)) :]
    for unpack in _UNPACKERS:
        with contextlib.suppress(MalformedPacket):
            read = unpack(body)
            if isinstance(read, Selection):
                read.indices()


_HASHES = [bytes([n]) * 32 for n in range(1, 6)]
_INFOS = [BlockInfo(n + 1, n * 100, n, float(n), n, -n, ("hop", "rotation")[n % 2], 9, b"c") for n in range(5)]
_LOG = [
    encode_record(Record(RecordOp.ADD, _HASHES, _INFOS)),
    encode_record(Record(RecordOp.REMOVE, _HASHES[2:4])),
    encode_record(Record(RecordOp.ADD, _HASHES[2:3], _INFOS[:1], start=2, parent=_HASHES[1])),
    encode_record(Record(RecordOp.REMOVE_CONTEXT, context=b"c")),
    encode_record(Record(RecordOp.CLEAR)),
]


def _sealed(data: bytes, crc_at: int, end: int | None = None) -> bytes:
    made = bytearray(data)
    if len(made) >= crc_at + 4:
        made[crc_at : crc_at + 4] = bytes(4)
        struct.pack_into("<I", made, crc_at, zlib.crc32(made[:end]))
    return bytes(made)


def journal(dice: random.Random) -> None:
    """A log replays up to where it is whole; a sealed lie is refused by name, in the reading or in the applying."""
    records = [dice.choice(_LOG) for _ in range(dice.randint(1, 3))]
    at = dice.randrange(len(records))
    mutant = mutate(dice, records[at], _LOG)
    if len(mutant) >= 12 and dice.random() < 0.8:
        mutant = bytearray(mutant)
        struct.pack_into("<I", mutant, 4, len(mutant) - 12)
        mutant = _sealed(bytes(mutant), 8)
    records[at] = mutant
    index = RadixIndex()
    with contextlib.suppress(MalformedPacket, InvalidInput):
        found, taken = decode_records(b"".join(records))
        assert taken <= sum(map(len, records))
        for record in found:
            replay(record, index)
        assert index.longest_prefix(_HASHES) <= 5


_PLAN = to_json(make_plan())
_WORDS: tuple[object, ...] = (None, True, "", "x", -1, 0, 1, 5, 19, 1e308, float("nan"), 2**70, [], [0], {}, "rotation")


def plan(dice: random.Random) -> None:
    """A file that a person edited badly: as text, or one value of it replaced."""
    if dice.random() < 0.4:
        text = mutate(dice, _PLAN.encode(), [_PLAN.encode()]).decode("utf-8", "replace")
    else:
        found = json.loads(_PLAN)
        inner = found
        while dice.random() < 0.5 and (below := [v for v in _values(inner) if isinstance(v, dict | list) and v]):
            inner = dice.choice(below)
        if isinstance(inner, dict):
            inner[dice.choice([*inner, "new"])] = dice.choice(_WORDS)
        else:
            inner[dice.randrange(len(inner))] = dice.choice(_WORDS)
        text = json.dumps(found)
    with contextlib.suppress(InvalidInput):
        made = from_json(text)
        assert from_json(to_json(made)) == made


def _values(part: object) -> list[object]:
    return list(part.values()) if isinstance(part, dict) else list(part) if isinstance(part, list) else []


TARGETS: dict[str, tuple[Callable[[], Target], float]] = {
    "satellite": (SatelliteTarget, 0.29),
    "client": (ClientTarget, 0.23),
    "bodies": (lambda: bodies, 0.19),
    "journal": (lambda: journal, 0.15),
    "plan": (lambda: plan, 0.05),
    "events": (EventsTarget, 0.03),
    "metrics": (lambda: metrics, 0.02),
    "grpc": (GrpcTarget, 0.02),
    "resp": (RespTarget, 0.02),
}
"""Each with its share of the inputs."""


def fuzz(name: str, inputs: int, seed: int) -> None:
    """Raises what the target let through, with what is needed to see it again."""
    target = TARGETS[name][0]()
    dice = random.Random(f"{name} {seed}")
    for number in range(inputs):
        try:
            target(dice)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}, input {number}: {type(error).__name__}: {error}") from error
