"""CHECK and CHECKED: whether a satellite has all that one server of a value should have, and if not, room for it.

HAS cannot tell: with copies, a satellite is the place of one server by one copy and of another by the next.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.protocol.chunk_store import ChunkStore
from skymemory.protocol.dead import SETTING_BYTES, Dead, setting_of
from skymemory.protocol.departures import Departures
from skymemory.protocol.messages import KEY_BYTES, Buffer, Packet
from skymemory.protocol.share import Share
from skymemory.protocol.verdicts import pack_verdicts, unpack_verdicts
from skymemory.protocol.whereabouts import Whereabouts
from skymemory.protocol.wire import CHUNK_REF_BYTES, FLAG_SETTLED, MAX_CHUNK_BYTES, ChunkRef, Op

MAX_CHECKS_PER_PACKET = 100
ANSWER_S = 0.3
"""How long an answer is waited for."""
_MOST_BURIED = 4096
_COUNT = struct.Struct(">HH")
_CHECK = struct.Struct(">32s12sHHII")


class Check(NamedTuple):
    """The chunks of server ``server`` (0-based) of a value: so many ``servers`` share its ``chunks`` of
    ``length_bytes`` each.
    """

    key: bytes
    setting: bytes
    servers: int
    server: int
    chunks: int
    length_bytes: int

    @classmethod
    def of(cls, packed: bytes, server: int) -> Check:
        """Of the value that a packed reference is of."""
        ref = ChunkRef.unpack(packed)
        return cls(ref.key, setting_of(packed), ref.tag.servers, server, ref.chunks, ref.length_bytes)

    @property
    def expected(self) -> int:
        """How many chunks these are."""
        return -(-(self.chunks - self.server) // self.servers)

    def held_in(self, share: Share) -> list[int]:
        """Which of them are in a share."""
        return [
            index
            for index, (ref, _) in share.items()
            if index % self.servers == self.server and index < self.chunks and setting_of(ref) == self.setting
        ]


class Found(IntEnum):
    """What CHECKED says of each: the numbers of the wire."""

    WHOLE = 0
    LACKING = 1
    """Some are not here, and there is room for them."""
    NO_ROOM = 2
    """Some are not here and not wanted: something would have to go for them, chunks of another setting are in their
    places, or the value is known to be dead.
    """


def pack_checks(checks: Sequence[Check]) -> bytes:
    if not 1 <= len(checks) <= MAX_CHECKS_PER_PACKET:
        raise InvalidInput(f"{len(checks)} in one CHECK: expected 1 to {MAX_CHECKS_PER_PACKET}")
    packed = (_CHECK.pack(c.key, c.setting, c.servers, c.server + 1, c.chunks, c.length_bytes) for c in checks)
    return _COUNT.pack(len(checks), 0) + b"".join(packed)


def unpack_checks(body: Buffer) -> list[Check]:
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else 0
    if not 1 <= count <= MAX_CHECKS_PER_PACKET or len(body) != _COUNT.size + count * _CHECK.size:
        raise MalformedPacket(f"CHECK of {count} in {len(body)} bytes")
    checks = []
    for key, setting, servers, number, chunks, length_bytes in _CHECK.iter_unpack(body[_COUNT.size :]):
        if not 1 <= number <= min(servers, chunks) or length_bytes > MAX_CHUNK_BYTES:
            raise MalformedPacket(f"CHECK of server {number} of {servers}, {chunks} chunks of {length_bytes} bytes")
        checks.append(Check(key, setting, servers, number - 1, chunks, length_bytes))
    return checks


def pack_found(found: Sequence[Found]) -> bytes:
    return pack_verdicts(found)


def unpack_found(body: Buffer) -> list[Found]:
    return unpack_verdicts(body, Op.CHECKED, Found)


@dataclass(frozen=True, slots=True)
class Answer:
    """What ``place`` said of ``checks``. ``same_moves``: it counts the moves that we do; ``settled``: none of these
    chunks is being handed over there, and none of their keys being written.
    """

    place: SatelliteId
    checks: list[Check]
    found: list[Found]
    same_moves: bool
    settled: bool


Heard = Callable[[Answer, float], None]
"""Told of an answer, and when."""
Settled = Callable[[bytes, Iterable[int], float], bool]
"""Whether what is said here of these chunks of a key is no matter of a handover, or of a writer still at it."""


@dataclass(slots=True)
class _Asked:
    place: SatelliteId
    checks: list[Check]
    heard: Heard
    until_s: float


class Checks:
    """The questions of one satellite on their way, and its answers to those of others."""

    def __init__(
        self, store: ChunkStore, whereabouts: Whereabouts, departures: Departures, counters: Counters, settled: Settled
    ) -> None:
        self.settled = settled
        self._store = store
        self._whereabouts = whereabouts
        self._departures = departures
        self._counters = counters
        self._buried: OrderedDict[bytes, bytes] = OrderedDict()
        """The dead dropped last, key and setting: copies of them are not wanted."""
        self._asked: dict[int, _Asked] = {}
        self._next_request_id = 0xC0000000

    @property
    def asking(self) -> bool:
        """Whether answers are awaited."""
        return bool(self._asked)

    def ask(
        self, place: SatelliteId, checks: list[Check], heard: Heard, now_s: float, answer_s: float = ANSWER_S
    ) -> None:
        """Nothing is repeated: whoever does not answer is not heard."""
        self._asked = {n: asked for n, asked in self._asked.items() if asked.until_s > now_s}
        for at in range(0, len(checks), MAX_CHECKS_PER_PACKET):
            page = checks[at : at + MAX_CHECKS_PER_PACKET]
            number = self._next_request_id
            self._next_request_id = 0xC0000000 | (number + 1) & 0x3FFFFFFF
            self._asked[number] = _Asked(place, page, heard, now_s + answer_s)
            self._counters.add("questions_asked")
            self._departures.command(Op.CHECK, place, number, pack_checks(page), now_s)

    def bury(self, dead: Iterable[Dead]) -> None:
        """Copies of these are not wanted back, as somebody may offer who does not know yet that they are dead."""
        self._buried.update(dead)
        while len(self._buried) > _MOST_BURIED:
            self._buried.popitem(last=False)

    def stored(self, key: bytes) -> None:
        """A writer stored the key anew."""
        if self._buried:
            self._buried.pop(key, None)

    def answered(self, packet: Packet, now_s: float) -> None:
        """A CHECKED for us."""
        asked = self._asked.pop(packet.header.request_id, None)
        found = unpack_found(packet.body)
        if asked is not None and len(found) == len(asked.checks):
            same_moves = (packet.header.slot_moves, packet.header.plane_moves) == self._whereabouts.moves
            settled = bool(packet.header.flags & FLAG_SETTLED)
            asked.heard(Answer(asked.place, asked.checks, found, same_moves, settled), now_s)

    def receive(self, packet: Packet, now_s: float) -> None:
        """A CHECK for us. Room is told once to whoever asks for much at a time."""
        room_bytes = self._store.limit_bytes - self._store.used_bytes
        found, settled = [], True
        for check in unpack_checks(packet.body):
            share = self._store.shares.get(check.key, {})
            held = check.held_in(share)  # never more than is here, whatever number of chunks a packet claims
            settled = settled and self.settled(check.key, held, now_s)
            lacking = check.expected - len(held)
            size_bytes = lacking * (check.length_bytes + CHUNK_REF_BYTES)
            if lacking <= 0:
                found.append(Found.WHOLE)
            elif (
                size_bytes > room_bytes
                or self._buried.get(check.key) == check.setting
                or _taken_by_others(check, share)
            ):
                found.append(Found.NO_ROOM)
            else:
                room_bytes -= size_bytes
                found.append(Found.LACKING)
        self._departures.reply(
            packet.header, Op.CHECKED, pack_found(found), now_s, flags=FLAG_SETTLED if settled else 0
        )


def _taken_by_others(check: Check, share: Share) -> bool:
    """Whether something of another setting is where these chunks would be: which is the later nobody can tell."""
    return any(
        index % check.servers == check.server and setting_of(ref) != check.setting for index, (ref, _) in share.items()
    )


assert _CHECK.size == KEY_BYTES + SETTING_BYTES + 12
