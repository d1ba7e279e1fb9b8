"""A stranger on the ports of dead satellites: he has overheard answers and knows the wire format, but no key."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.keys import first_ring
from skymemory.protocol import messages
from skymemory.protocol.auth import FLAG_AUTHENTICATED, MAC_BYTES, Authority
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping, ValueInfo
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    COMMAND_BYTES,
    COMMAND_PREFIX_BYTES,
    TELEMETRY_BYTES,
    ChunkRef,
    Op,
    SkyHeader,
    Status,
    build_packet,
    single,
)
from skymemory.transport.simulated import SimulatedClient, SimulatedConstellation

SECRET, ANOTHER_SECRET = bytes(range(32)), bytes(range(1, 33))
_REQUEST_AT = TELEMETRY_BYTES + 16
_REMEMBERED = 15
"""Answers of each kind."""


def authority(**level: bool) -> Authority:
    """Of a constellation whose satellites sign their answers, by default."""
    return Authority(first_ring(SECRET), **(level or {"signed_answers": True}))


def resealed(answer: bytes) -> bytes:
    """A changed answer with a right checksum."""
    row = bytearray(answer)
    native.seal_headers(row, len(row), TELEMETRY_BYTES)
    return bytes(row)


class Stranger:
    """Answers what comes to dead satellites: with what he has overheard of each, with answers to another request made
    to fit this one, and with answers of his own, unsigned and signed by a key of his own.
    """

    def __init__(self, replays: bool = True, forges: bool = True) -> None:
        self.replays, self.forges = replays, forges
        self.sent = 0
        self._heard: dict[SatelliteId, dict[int, deque[bytes]]] = defaultdict(
            lambda: defaultdict(lambda: deque(maxlen=_REMEMBERED))
        )

    def overhear(self, answer: bytes) -> None:
        source = SkyHeader.unpack(memoryview(answer), TELEMETRY_BYTES).source
        self._heard[SatelliteId(source.plane, source.slot)][answer[TELEMETRY_BYTES + 1]].append(answer)

    def answers(self, request: bytes) -> list[bytes]:
        """To a command for a dead satellite."""
        asked = SkyHeader.unpack(memoryview(request), COMMAND_BYTES)
        by_op = self._heard[SatelliteId(asked.destination.plane, asked.destination.slot)]
        heard = [answer for answers in by_op.values() for answer in answers]
        found: list[bytes] = []
        if self.replays:
            found += heard
        if self.forges:
            found += (self._made_to_fit(answer, asked) for answer in heard if answer[TELEMETRY_BYTES + 1] != Op.DATA)
            for forged in self._forged(request, asked):
                found += forged, self._signed(forged)
        self.sent += len(found)
        return found

    @staticmethod
    def _made_to_fit(answer: bytes, asked: SkyHeader) -> bytes:
        return resealed(answer[:_REQUEST_AT] + asked.request_id.to_bytes(4, "big") + answer[_REQUEST_AT + 4 :])

    @staticmethod
    def _signed(forged: bytes) -> bytes:
        return bytes(Authority(first_ring(ANOTHER_SECRET), True).sign(single(forged), 0.0).headers)

    @staticmethod
    def _forged(request: bytes, asked: SkyHeader) -> list[bytes]:
        def answer(op: Op, body: bytes, status: Status = Status.OK) -> bytes:
            header = SkyHeader(
                op,
                asked.source,
                asked.destination,
                asked.ground,
                asked.request_id,
                status,
                64,
                0,
                0,
                asked.timestamp_us,
            )
            return build_packet(header, body, 0, 0.0)

        signed = bool(asked.flags & FLAG_AUTHENTICATED)
        body = request[COMMAND_PREFIX_BYTES : len(request) - MAC_BYTES * signed]
        refused = answer(Op.UNREACHABLE, b"", Status.REFUSED)
        if asked.op is Op.SET:
            ref = ChunkRef.unpack(memoryview(request)[COMMAND_PREFIX_BYTES:][:CHUNK_REF_BYTES])
            return [answer(Op.ACK, Selection.of(ref.key, [ref.index]).pack())]
        if asked.op is Op.GET:
            return [answer(Op.BUSY, body), answer(Op.MISS, body), refused]
        if asked.op is Op.PING:
            return [answer(Op.PONG, messages.pack_housekeeping({})), refused]
        if asked.op is Op.HAS:
            return [answer(Op.PRESENCE, messages.pack_presences([None] * len(messages.unpack_keys(body))))]
        return [refused]


class HauntedConstellation(SimulatedConstellation):
    """With a stranger on the ports of its dead satellites, who hears all that clients are answered."""

    stranger: Stranger | None = None

    def _deliver(self, arrival: Any) -> None:
        _, _, receiver, sender, data, segment_bytes = arrival
        if self.stranger is not None:
            packets = [data[at : at + segment_bytes] for at in range(0, len(data), segment_bytes)]
            if receiver in self._clients and sender not in self._dead:
                for packet in packets:
                    self.stranger.overhear(bytes(packet))
            elif receiver in self._dead and not isinstance(sender, SatelliteId):
                for packet in packets:
                    for answer in self.stranger.answers(bytes(packet)):
                        self._arrive([answer], self._delay_s(receiver, sender), receiver, sender)
        super()._deliver(arrival)


class Sky:
    """A haunted constellation and one client; values of a few chunks on each of ten satellites."""

    def __init__(self, sky: SkyMap, by: Authority, replicas: int = 1, **more: Any) -> None:
        self.sim = HauntedConstellation(sky, 64 << 20, None, lambda one, other: 0.004, authority=by, **more)
        self.client: SimulatedClient = self.sim.connect(ClientConfig(7, expected_rtt_s=0.008, authority=by))
        self.replicas = replicas
        self._dice = random.Random(1)

    def put(self) -> tuple[ValueInfo, bytes] | None:
        """A new value, if it is acknowledged."""
        key, value, infos = self._dice.randbytes(32), self._dice.randbytes(40_000), list[ValueInfo]()
        done = self.client.write(key, value, Striping(2000, 3, 10, self.replicas), meanwhile=infos.append)
        return (infos[0], value) if done.ok else None

    def reads(self, written: tuple[ValueInfo, bytes]) -> bool:
        info, value = written
        out = bytearray(info.value_bytes)
        done = self.client.read(info, memoryview(out), self.replicas)
        assert not done.ok or out == value
        return done.ok

    def ping(self) -> bool:
        """Whether all satellites answer."""
        with self.client.lock:
            machine, satellites = self.client.machine, self.sim.satellites
            asked = [machine.ask(Op.PING, b"", satellite, self.sim.now_s) for satellite in satellites]
        return all(answer.ok for answer in self.client.run(asked).values())

    def seconds(self, action: Callable[[], object]) -> float:
        """Virtual time that it takes."""
        began_s = self.sim.now_s
        action()
        return self.sim.now_s - began_s

    def counted(self, name: str) -> int:
        return self.client.machine.counters.get(name)
