"""Copies that were lost are made anew, by the satellites that have the others.

Now and then a satellite asks, of each server's share that it holds whole, the satellite of the *next* copy (the one
after the last is the first) whether it has its own. Where some of it is not there, and there is room, the chunks are
sent, as that copy. So a satellite or plane that came back empty is filled again by those that stayed alive, read or
not; what was evicted for want of room is not pushed back in. Nothing is asked or sent while chunks are handed over.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.messages import KEY_BYTES, Buffer, Packet, pack_verdicts, unpack_verdicts
from skymemory.protocol.satellite.handover import Handover
from skymemory.protocol.satellite.locator import Whereabouts
from skymemory.protocol.satellite.memory import ChunkStore, Share, as_copy, told_by
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.tombstones import SETTING_BYTES, Dead, setting_of
from skymemory.protocol.wire import CHUNK_REF_BYTES, FLAG_SETTLED, MAX_CHUNK_BYTES, REPLICA_OFFSET, ChunkRef, Op

_MOST_PACKETS = 8
"""CHECKs of one sweep; the next goes on where it stopped."""
MOST_BYTES = 16 << 20
"""What one satellite sends for one sweep: copies are made in the background."""


class Mending:
    """One satellite's part of it. ``replicas`` 1: none."""

    def __init__(
        self,
        here: SatelliteId,
        replicas: int,
        sweep_s: float,
        store: ChunkStore,
        whereabouts: Whereabouts,
        checks: Checks,
        handover: Handover,
        counters: Counters,
        now_s: float,
    ) -> None:
        self._here = here
        self._replicas = replicas
        self._sweep_s = sweep_s
        self._store = store
        self._whereabouts = whereabouts
        self._checks = checks
        self._handover = handover
        self._counters = counters
        self._swept_to = b""
        self._swept_moves: Moves = whereabouts.moves
        self._left_bytes = 0
        self.next_s = now_s + sweep_s if replicas > 1 else math.inf
        """When ``handle_timer`` has something to do; infinite: never."""

    def handle_timer(self, now_s: float) -> None:
        if now_s < self.next_s:
            return
        self.next_s = now_s + self._sweep_s
        still = self._whereabouts.moves == self._swept_moves and self._handover.at_rest
        self._swept_moves = self._whereabouts.moves
        if still:
            self._left_bytes = MOST_BYTES
            self._sweep(now_s)

    def _sweep(self, now_s: float) -> None:
        limit = _MOST_PACKETS * MAX_CHECKS_PER_PACKET
        keys = self._store.keys_after(self._swept_to, limit)
        self._swept_to = keys[-1] if len(keys) == limit else b""
        by_place: dict[SatelliteId, list[Check]] = {}
        asked = 0
        for key in keys:
            for place, check in self._next_copies(key):
                by_place.setdefault(place, []).append(check)
                asked += 1
            if asked >= limit:
                self._swept_to = key
                break
        for place, checks in by_place.items():
            self._checks.ask(place, checks, self._heard, now_s)

    def _next_copies(self, key: bytes) -> list[tuple[SatelliteId, Check]]:
        """Who should have the next copy of what we hold whole of the latest setting of a key."""
        found = []
        for (_, replica), (check, indices) in self._whole(key).items():
            ref = self._store.shares[key][indices[0]][0]
            try:
                place = self._whereabouts.home(as_copy(ref, (replica + 1) % self._replicas))
                ours = self._whereabouts.home(ref) == self._here
            except InvalidInput:  # a box too small for so many copies
                continue
            if ours and place != self._here:
                found.append((place, check))
        return found

    def _whole(self, key: bytes) -> dict[tuple[int, int], tuple[Check, list[int]]]:
        """Of which servers, and as which copy, we hold all chunks; and which these are."""
        share = self._store.shares.get(key)
        if not share:
            return {}
        latest = share[told_by(share)][0]
        servers = ChunkRef.unpack(latest).tag.servers
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (ref, _) in share.items():
            if setting_of(ref) == setting_of(latest):
                groups.setdefault((index % servers, ref[REPLICA_OFFSET]), []).append(index)
        checks = {name: (Check.of(latest, name[0]), indices) for name, indices in groups.items()}
        return {name: one for name, one in checks.items() if len(one[1]) == one[0].expected}

    def _heard(self, answer: Answer, now_s: float) -> None:
        """Send what is lacking there, as far as the budget goes."""
        if not answer.same_moves:
            return
        for check, what in zip(answer.checks, answer.found, strict=True):
            if what is not Found.LACKING or self._left_bytes <= 0:
                continue
            for (server, replica), (ours, indices) in self._whole(check.key).items():
                copy = (replica + 1) % self._replicas
                if server != check.server or ours.setting != check.setting:
                    continue
                ref = self._store.shares[check.key][indices[0]][0]
                if self._whereabouts.home(as_copy(ref, copy)) == answer.place:
                    self._left_bytes -= len(indices) * (check.length_bytes + CHUNK_REF_BYTES)
                    self._counters.add("copies_mended", len(indices))
                    self._handover.enqueue(answer.place, [(check.key, index, copy) for index in indices])


# Which shares of a value are not whole on this satellite, and who else has copies of them.


class Copies:
    """As one satellite sees them, where ``replicas`` of each chunk are kept."""

    def __init__(
        self, here: SatelliteId, replicas: int, store: ChunkStore, whereabouts: Whereabouts, sky: SkyMap
    ) -> None:
        self._here = here
        self._replicas = range(replicas)
        self._store = store
        self._whereabouts = whereabouts
        self._sky = sky

    def to_ask(
        self, key: bytes, distance: int, before: Moves | None = None
    ) -> list[tuple[Check, tuple[SatelliteId, ...]]]:
        """Shares of a key that is here whose whole copies must be elsewhere if anywhere, with the satellites that may
        have them: those that are not whole here, and that of the server ``distance`` further in the ring.

        ``before`` the box moved, they were elsewhere; then both places may have them, and nothing needs to be here yet.
        """
        share = self._store.shares.get(key)
        if not share:
            return []
        packed = share[told_by(share)][0]
        ref = ChunkRef.unpack(packed)
        further = (ref.tag.server + distance) % min(ref.tag.servers, ref.chunks)
        shares = [*self._not_whole(packed, before is None), Check.of(packed, further)]
        wanted = dict.fromkeys(shares if self.missing(shares[-1]) else shares[:-1])
        return [(check, others) for check in wanted if (others := self.others(packed, check.server, before))]

    def gone(self, packed: bytes, before: Moves | None = None) -> list[tuple[Check, tuple[SatelliteId, ...]]]:
        """Of a value that chunks were evicted of here, one reference given: the shares that are not whole here, with
        the satellites of their other copies.
        """
        return [(check, self.others(packed, check.server, before)) for check in self._not_whole(packed, True)]

    def missing(self, check: Check) -> list[int]:
        """Which chunks of a share are not here, the first of them: as many as a proof asks about, whatever number a
        reference claims.
        """
        held = set(check.held_in(self._store.shares.get(check.key, {})))
        missing = (index for index in range(check.server, check.chunks, check.servers) if index not in held)
        return list(islice(missing, MAX_CHECKS_PER_PACKET))

    def others(self, packed: bytes, server: int, before: Moves | None = None) -> tuple[SatelliteId, ...]:
        """Where the copies of a server's share are, or were before: everybody but this satellite."""
        places: dict[SatelliteId, None] = {}
        for moves in dict.fromkeys((self._whereabouts.moves, before or self._whereabouts.moves)):
            for replica in self._replicas:
                try:
                    places[self._servers(packed, moves, replica)[server]] = None
                except InvalidInput:  # a box too small for so many copies, or a placement that we do not know
                    break
        return tuple(place for place in places if place != self._here)

    def _not_whole(self, packed: bytes, ours: bool) -> list[Check]:
        """The shares that we hold in part; and with ``ours`` those that belong here and of which we hold nothing."""
        ref = ChunkRef.unpack(packed)
        share = self._store.shares.get(ref.key, {})
        servers = {index % ref.tag.servers for index in share} if share else set[int]()
        if ours:
            servers |= self._belonging(packed)
        checks = [Check.of(packed, server) for server in sorted(servers) if server < ref.chunks]
        held = {check: len(check.held_in(share)) for check in checks}
        return [check for check in checks if held[check] < check.expected and (held[check] or ours)]

    def _belonging(self, packed: bytes) -> set[int]:
        """The servers of which some copy belongs here."""
        found = set[int]()
        for replica in self._replicas:
            try:
                places = self._servers(packed, self._whereabouts.moves, replica)
            except InvalidInput:
                break
            found.update(server for server, place in enumerate(places) if place == self._here)
        return found

    def _servers(self, packed: bytes, moves: Moves, replica: int) -> tuple[SatelliteId, ...]:
        tag = ChunkRef.unpack(packed).tag
        set_moves = tag.slot_moves, tag.plane_moves
        return self._sky.servers_at(tag.strategy, tag.servers, set_moves, moves, replica)


# CHECK and CHECKED: whether a satellite has all that one server of a value should have, and if not, room for it.
#
# HAS cannot tell: with copies, a satellite is the place of one server by one copy and of another by the next.


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
