"""Where packets enter a machine that asks for MACs: what is authentic comes in as a plain packet, the rest is refused.

Behind the gate nothing knows of keys. A satellite's gate opens commands for it, and checks what a ground host hands it
for others before it is passed on; a neighbour's packets in transit are passed on unread. A client's gate opens answers,
where those carry MACs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.native import Run
from skymemory.protocol.authentication import (
    CARRIERS,
    KEY_ID_OFFSET,
    MAC_BYTES,
    MAX_SIGNED_CHUNK_BYTES,
    TIMESTAMP_OFFSET,
    Authority,
    claims_mac,
    opened,
    without_mac,
    without_macs,
)
from skymemory.protocol.forwarding import LinkEnd, header_start, same_journey
from skymemory.protocol.replay import MAX_SKEW_S, START_GRACE_S, ReplayWindow, stamp
from skymemory.protocol.space_packet import COMMAND_BYTES, TELEMETRY_BYTES
from skymemory.protocol.wire import CHUNK_REF_BYTES, SKY_BYTES, Address, Op

Refuse = Callable[[memoryview, LinkEnd, float], None]
"""Told of a sound command of a ground host's that was refused, the link it came by, and the time."""

_MAX_SKEW_US = int(MAX_SKEW_S * 1e6)
_COMMAND_BIT = 0x10
_LONGEST_CARRIER = COMMAND_BYTES + SKY_BYTES + CHUNK_REF_BYTES + MAC_BYTES + MAX_SIGNED_CHUNK_BYTES
_Opened = tuple[memoryview, bytearray]


class SatelliteGate:
    """The gate of one satellite. It counts ``packets_refused``, ``packets_replayed`` and ``packets_malformed``, and as
    ``packets_received`` what it does not let in.
    """

    def __init__(self, authority: Authority, here: Address, counters: Counters, refuse: Refuse, now_s: float) -> None:
        self._authority = authority
        self._here = here.pack().to_bytes(4, "big")
        self._counters = counters
        self._refuse = refuse
        self._window = ReplayWindow(int((now_s - START_GRACE_S) * 1e6))
        self._guarded_us = 0
        self._guard = (self._open_get, self._is_new_get)

    @classmethod
    def of(
        cls, authority: Authority | None, here: Address, counters: Counters, refuse: Refuse, now_s: float
    ) -> SatelliteGate | None:
        """None where no MACs are asked for."""
        return None if authority is None else cls(authority, here, counters, refuse, now_s)

    @property
    def every_packet(self) -> bool:
        """Whether our answers carry MACs too."""
        return self._authority.every_packet

    def guard(self, now_s: float) -> native.Guard:
        """For ``native.serve``, until the machine is next called: it takes GETs by our own beam past this gate."""
        self._guarded_us = int(now_s * 1e6)
        return self._guard

    def _open_get(self, packet: bytes) -> bytes | None:
        view = memoryview(packet)
        sent_us = self._sent_us(view, self._guarded_us)
        if sent_us is None or not claims_mac(view, COMMAND_BYTES):
            return None
        head = opened(self._authority, view, COMMAND_BYTES, sent_us >> 32)
        return None if head is None else bytes(without_mac(head, COMMAND_BYTES))

    def _is_new_get(self, packet: bytes) -> bool:
        view = memoryview(packet)
        sent_us = self._sent_us(view, self._guarded_us)
        return sent_us is not None and self._is_first(view, sent_us)

    def admit(self, runs: list[Run], source: LinkEnd, now_s: float) -> list[Run]:
        """What may come in of the runs from one link, in their order; ours as plain packets."""
        admitted: list[Run] = []
        for view, size in runs:
            if size > 0 and same_journey(view, size):
                self._admit(view, size, source, now_s, admitted)
            else:
                for at in range(0, len(view), size) if size > 0 else ():
                    self._admit(view[at : at + size], size, source, now_s, admitted)
        return admitted

    def _admit(self, view: memoryview, size: int, source: LinkEnd, now_s: float, admitted: list[Run]) -> None:
        """Packets of one operation for one destination."""
        sky = header_start(view)
        if len(view) < sky + SKY_BYTES:
            admitted.append((view, size))  # malformed, as the machine will find
            return
        to_me = view[sky + 4 : sky + 8] == self._here
        command = bool(view[0] & _COMMAND_BIT)
        from_ground = not isinstance(source, SatelliteId)
        if command and (to_me or from_ground):
            packets = self._authentic(view, size, source, now_s)
        elif to_me and self._authority.every_packet:
            packets = self._answers(view, size)
        else:
            admitted.append((view, size))
            return
        if to_me:
            admitted += plain_runs(packets, sky)
        elif len(packets) == -(-len(view) // size):
            admitted.append((view, size))
        else:
            admitted += [(packet, len(packet)) for packet, _ in packets]

    def _authentic(self, view: memoryview, size: int, source: LinkEnd, now_s: float) -> list[_Opened]:
        now_us = int(now_s * 1e6)
        found: list[_Opened] = []
        refused: list[memoryview] = []
        replayed = 0
        for at in range(0, len(view), size):
            packet = view[at : at + size]
            sent_us = self._sent_us(packet, now_us)
            head = None
            if sent_us is not None and claims_mac(packet, COMMAND_BYTES):
                head = opened(self._authority, packet, COMMAND_BYTES, sent_us >> 32)
            if head is None or sent_us is None:
                refused.append(packet)
            elif self._is_first(packet, sent_us):
                found.append((packet, head))
            else:
                replayed += 1
        if replayed:
            self._counters.add("packets_received", replayed)
            self._counters.add("packets_replayed", replayed)
        if refused:
            self._turn_away(refused, source, now_s)
        return found

    def _sent_us(self, packet: memoryview, now_us: int) -> int | None:
        """When the packet says it was sent, whole; None for one that is not of now, or too large to be one of ours."""
        at = COMMAND_BYTES + TIMESTAMP_OFFSET
        if len(packet) < COMMAND_BYTES + SKY_BYTES or (
            packet[COMMAND_BYTES + 1] in CARRIERS and len(packet) > _LONGEST_CARRIER
        ):
            return None
        ahead_us = (int.from_bytes(packet[at : at + 4], "big") - now_us + (1 << 31)) % (1 << 32) - (1 << 31)
        return now_us + ahead_us if -_MAX_SKEW_US <= ahead_us <= _MAX_SKEW_US else None

    def _is_first(self, packet: memoryview, sent_us: int) -> bool:
        source, ground = (int.from_bytes(packet[COMMAND_BYTES + at : COMMAND_BYTES + at + 4], "big") for at in (8, 12))
        key_at = COMMAND_BYTES + KEY_ID_OFFSET
        key_id = int.from_bytes(packet[key_at : key_at + 2], "big")
        sequence = int.from_bytes(packet[2:4], "big") & 0x3FFF
        return self._window.first((key_id, ground, 0 if ground else source), stamp(sent_us, sequence))

    def _turn_away(self, packets: list[memoryview], source: LinkEnd, now_s: float) -> None:
        """Damaged packets are dropped as ever; of sound ones a ground host is told, once a run."""
        self._counters.add("packets_received", len(packets))
        sound = count_wrong(self._counters, packets)
        if sound and not isinstance(source, SatelliteId):
            self._refuse(sound[0], source, now_s)

    def _answers(self, view: memoryview, size: int) -> list[_Opened]:
        found, wrong = open_answers(self._authority, view, size)
        self._counters.add("packets_received", len(wrong))
        count_wrong(self._counters, wrong)
        return found


def count_wrong(counters: Counters, packets: list[memoryview]) -> list[memoryview]:
    """Count packets that are not authentic: the damaged as malformed, the sound, which are returned, as refused."""
    if not packets:
        return []
    sound = [packet for packet in packets if native.verify_segments(packet, max(1, len(packet))) == b"\0"]
    counters.add("packets_malformed", len(packets) - len(sound))
    counters.add("packets_refused", len(sound))
    return sound


def open_answers(authority: Authority, view: memoryview, size: int) -> tuple[list[_Opened], list[memoryview]]:
    """The authentic ones of some telemetry packets, opened, and the others. An answer needs no window: it counts only
    as long as its request is open, and only once.
    """
    found: list[_Opened] = []
    wrong: list[memoryview] = []
    for at in range(0, len(view), size):
        packet = view[at : at + size]
        whole = len(packet) >= TELEMETRY_BYTES + SKY_BYTES and claims_mac(packet, TELEMETRY_BYTES)
        head = opened(authority, packet, TELEMETRY_BYTES, 0) if whole else None
        if head is None:
            wrong.append(packet)
        else:
            found.append((packet, head))
    return found, wrong


def plain_runs(packets: list[_Opened], sky: int) -> list[Run]:
    """The packets without their MACs: carriers in runs as they came, others one by one."""
    runs: list[Run] = []
    if packets and packets[0][0][sky + 1] not in CARRIERS:
        runs += [(memoryview(without_mac(head, sky)), len(head)) for _, head in packets]
    elif packets:
        plain = without_macs(packets, sky)
        runs.append((plain, len(packets[0][0]) - MAC_BYTES))
    return runs


class ClientGate:
    """The gate of a ground host whose satellites sign their answers; it counts ``packets_refused``."""

    def __init__(self, authority: Authority, counters: Counters) -> None:
        self._authority = authority
        self._counters = counters

    def admit(self, runs: list[Run]) -> list[Run]:
        """What is authentic, as plain packets."""
        admitted: list[Run] = []
        for view, size in runs:
            if size <= 0 or len(view) <= TELEMETRY_BYTES or view[0] & _COMMAND_BIT:
                admitted.append((view, size))  # malformed, or nothing of ours, as the machine will find
                continue
            found, wrong = open_answers(self._authority, view, size)
            count_wrong(self._counters, wrong)
            for carries, group in groupby(found, key=lambda packet: packet[0][TELEMETRY_BYTES + 1] == Op.DATA):
                packets = list(group)
                admitted += (
                    plain_runs(packets, TELEMETRY_BYTES)
                    if carries
                    else [run for packet in packets for run in plain_runs([packet], TELEMETRY_BYTES)]
                )
        return admitted
