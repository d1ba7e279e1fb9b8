"""Authentication of packets: MACs, and refusal of replays. After a gate, a packet is plain again.

An authenticated packet has flag 0x01 and a key id in its SKY header, and a MAC of 16 bytes at the end of its body
(``native.twin.segments``). Payloads have only a CRC-32, but if answers are signed, the MACs of SET and MIGRATE cover
them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ValueTooLarge
from skymemory.keys import SECRET_BYTES, KeyRing, SecretKey
from skymemory.metrics import Counters
from skymemory.native import PAYLOAD_KEY_BYTES, Run
from skymemory.protocol.wire import (
    CHUNK_REF_BYTES,
    COMMAND_BIT,
    COMMAND_BYTES,
    GROUND_SHELL,
    MAX_CHUNK_BYTES,
    MAX_PACKET_BYTES,
    SKY_BYTES,
    TELEMETRY_BYTES,
    Address,
    Buffer,
    LinkEnd,
    Op,
    SegmentBatch,
    Status,
    header_start,
    microseconds,
)

FLAG_AUTHENTICATED = 0x01
MAC_BYTES = 16
FLAGS_OFFSET, TIMESTAMP_OFFSET, KEY_ID_OFFSET = 2, 24, 38
MAX_SIGNED_CHUNK_BYTES = MAX_CHUNK_BYTES - MAC_BYTES
CARRIERS = (Op.SET, Op.MIGRATE, Op.DATA)

_ANSWER_AT, _STATUS_AT = TELEMETRY_BYTES + 1, TELEMETRY_BYTES + 3
_PURPOSE = b"skymemory packets 1"
_PAYLOADS_PURPOSE = b"skymemory payloads 1"
_CHANGE_CLOCK_S = 0.5


@dataclass(slots=True)
class Authority:
    """Secret keys of those who may command satellites, replaceable at any time, and which packets get MACs.

    ``signed_answers``: also answers to ground hosts except DATA, and payloads of SET and MIGRATE; ``every_packet``:
    all.
    """

    ring: KeyRing
    every_packet: bool = False
    signed_answers: bool = False
    wall_shift_s: float = 0.0
    signs_by_wall: bool = False
    heard_s: float = -math.inf
    """Time of the last authentic command by the machines' time."""
    heard_by_wall: bool = False
    """True if the wall clock, which is ahead, is believed: for ``ALONE_S``, commands carried only its time."""
    _keys: tuple[KeyRing, dict[int, bytes]] | None = None
    _clock_changed_s: float = -math.inf

    def on_refused(self, now_s: float) -> None:
        """Sign by the other of this computer's clocks after a refusal, if the wall clock was set."""
        if (self.wall_shift_s or self.signs_by_wall) and now_s >= self._clock_changed_s + _CHANGE_CLOCK_S:
            self._clock_changed_s, self.signs_by_wall = now_s, not self.signs_by_wall

    @property
    def mac_keys(self) -> dict[int, bytes]:
        if self._keys is None or self._keys[0] is not self.ring:
            ring = self.ring
            self._keys = (ring, {key.key_id: self._mac_key(key) for key in ring.keys})
        return self._keys[1]

    def _mac_key(self, key: SecretKey) -> bytes:
        return key.derive(_PURPOSE) + (payload_key(key) if self.covers_payloads else b"")

    @property
    def covers_payloads(self) -> bool:
        return self.signed_answers and not self.every_packet

    @property
    def proves_answers(self) -> bool:
        return self.every_packet or self.signed_answers

    def signing_key_id(self, now_s: float) -> int:
        return self.ring.active(now_s + self.wall_shift_s).key_id  # keys are created by the wall clock

    def signs(self, packet: Buffer) -> bool:
        head = memoryview(packet)
        if head[0] & COMMAND_BIT or self.every_packet:
            return True
        to_ground = head[TELEMETRY_BYTES + 4] == GROUND_SHELL
        return self.signed_answers and to_ground and head[_ANSWER_AT] != Op.DATA

    def sign(self, batch: SegmentBatch, now_s: float) -> SegmentBatch:
        """Return the batch with MACs, if its packets need them; ``batch`` is complete but unsigned, a packet per row.

        Raises:
            ValueTooLarge: a chunk's packet has no room for a MAC.
        """
        if not self.signs(batch.headers):
            return batch
        command = bool(batch.headers[0] & COMMAND_BIT)
        wall_s = now_s + self.wall_shift_s
        keys, key_id = self.mac_keys, self.signing_key_id(now_s)
        sky = COMMAND_BYTES if command else TELEMETRY_BYTES
        time_us, width = microseconds(wall_s if self.signs_by_wall else now_s) if command else 0, batch.header_bytes
        try:
            signed = native.sign_packets(batch.headers, width, sky, keys[key_id], key_id, time_us, batch.payloads)
        except ValueError as error:
            raise ValueTooLarge(
                f"{error}: at most {MAX_PACKET_BYTES} bytes with it; use chunks of {MAX_SIGNED_CHUNK_BYTES} at most"
            ) from None
        return SegmentBatch(signed, width + MAC_BYTES, batch.payloads)


def payload_key(key: SecretKey) -> bytes:
    parts = (key.derive(_PAYLOADS_PURPOSE + bytes([number])) for number in range(-(-PAYLOAD_KEY_BYTES // SECRET_BYTES)))
    return b"".join(parts)[:PAYLOAD_KEY_BYTES]


def claims_mac(packet: memoryview, sky: int) -> bool:
    return bool(packet[sky + FLAGS_OFFSET] & FLAG_AUTHENTICATED)


# --- Replays ---
#
# Every command has a number that ascends per sender: its time in microseconds, then the 14 bits of its sequence count.
# A retransmission is packed again, so it has a new number and passes; the same bytes do not pass twice.

MAX_SKEW_S = 30.0
REMEMBERED = 2048
MAX_SENDERS = 256
MAX_FORGOTTEN = 4096
START_GRACE_S = 1.0
_SEQUENCE_BITS = 14
_PASSED_US = int(2 * MAX_SKEW_S * 1e6)

Sender = tuple[int, int, int]
"""Key id, ground host and, if that is 0, a satellite's packed address."""


def stamp(time_us: int, sequence_count: int) -> int:
    """Return a command's number: unique and ascending per sender."""
    return time_us << _SEQUENCE_BITS | sequence_count


class _SeenNumbers:
    """Command numbers accepted from a sender, so that a replay is refused. Numbers up to ``floor`` count as seen; above
    it, two generations of sets bound the memory.
    """

    __slots__ = ("earlier", "floor", "newest", "recent")

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.newest = floor
        self.recent: set[int] = set()
        self.earlier: set[int] = set()

    def first(self, number: int) -> bool:
        if number <= self.floor or number in self.recent or number in self.earlier:
            return False
        self.recent.add(number)
        self._record_newest(number)
        return True

    def all_first(self, numbers: list[int]) -> bool:
        distinct = set(numbers)
        new = len(distinct) == len(numbers) > 0 and min(numbers) > self.floor
        if not (new and distinct.isdisjoint(self.recent) and distinct.isdisjoint(self.earlier)):
            return False
        self.recent |= distinct
        self._record_newest(max(numbers))
        return True

    def _record_newest(self, newest: int) -> None:
        self.newest = max(self.newest, newest)
        if len(self.recent) >= REMEMBERED:
            if self.earlier:
                self.floor = max(self.floor, max(self.earlier))
            self.earlier, self.recent = self.recent, set()


class ReplayWindow:
    """Filter of replayed commands: numbers already seen from each sender, in bounded memory."""

    def __init__(self, start_us: int) -> None:
        self._floor = stamp(start_us, 0) - 1
        self._senders: OrderedDict[Sender, _SeenNumbers] = OrderedDict()
        self._forgotten: OrderedDict[Sender, int] = OrderedDict()

    def first(self, sender: Sender, number: int) -> bool:
        """Return True, and remember it, if an authentic command is new."""
        return self._get_record(sender).first(number)

    def all_first(self, sender: Sender, numbers: list[int]) -> bool:
        """Remember all and return True, or remember none if any is not new."""
        return self._get_record(sender).all_first(numbers)

    def _get_record(self, sender: Sender) -> _SeenNumbers:
        record = self._senders.get(sender)
        if record is None:
            record = self._senders[sender] = _SeenNumbers(max(self._floor, self._forgotten.pop(sender, self._floor)))
            if len(self._senders) > MAX_SENDERS:
                self._forget_sender(*self._senders.popitem(last=False))
        else:
            self._senders.move_to_end(sender)
        return record

    def _forget_sender(self, sender: Sender, record: _SeenNumbers) -> None:
        self._forgotten[sender] = record.newest
        too_old = record.newest - stamp(_PASSED_US, 0)
        while len(self._forgotten) > MAX_FORGOTTEN or next(iter(self._forgotten.values())) < too_old:
            self._floor = max(self._floor, self._forgotten.popitem(last=False)[1])


# --- Gates ---

Refuse = Callable[[memoryview, LinkEnd, float], None]

REFUSALS_PER_S = 100
ALONE_S = 5.0
_MAX_SKEW_US = int(MAX_SKEW_S * 1e6)
_SOURCE = slice(COMMAND_BYTES + 8, COMMAND_BYTES + 12)


class SatelliteGate:
    """Gate of a satellite: admits only authentic and new commands."""

    def __init__(
        self, authority: Authority, address: Address, counters: Counters, refuse: Refuse, now_s: float
    ) -> None:
        self._authority = authority
        self._here = address.pack().to_bytes(4, "big")
        self._our_beam = Address(address.plane, address.slot, GROUND_SHELL).pack().to_bytes(4, "big")
        self._counters = counters
        self._refuse = refuse
        self._began_s = now_s
        self._window = ReplayWindow(microseconds(now_s - START_GRACE_S))
        self._has_authentic_command = False
        self._guarded_s = now_s
        self._answered_to_us = microseconds(now_s)

    @property
    def every_packet(self) -> bool:
        return self._authority.every_packet

    def guard(self, now_s: float) -> native.Guard:
        """Return keys, times and replay check with which ``native.serve`` admits GETs and SETs and signs ACKs, until
        the next call.
        """
        self._guarded_s = now_s
        authority = self._authority
        signer = authority.signing_key_id(now_s) if authority.signed_answers else 0
        return authority.mac_keys, microseconds(now_s), _MAX_SKEW_US, self._record_if_all_new, signer

    def _record_if_all_new(self, head: bytes, sent_us: int, sequences: list[int]) -> bool:
        self._authority.heard_s = self._guarded_s
        return self._window.all_first(_sender(head), [stamp(sent_us, sequence) for sequence in sequences])

    def admit(self, runs: list[Run], source: LinkEnd, now_s: float) -> tuple[list[Run], bool]:
        """Return the admitted runs, and True if an authentic command for this satellite was among them: that alone
        proves the link's other end.
        """
        admitted: list[Run] = []
        self._has_authentic_command = False
        for view, size in runs:
            if size <= 0:
                admitted.append((view, size))  # malformed: the machine counts it
            elif native.same_journey(view, size):
                self._admit_run(view, size, source, now_s, admitted)
            else:
                for at in range(0, len(view), size):
                    self._admit_run(view[at : at + size], size, source, now_s, admitted)
        return admitted, self._has_authentic_command

    def _admit_run(self, view: memoryview, size: int, source: LinkEnd, now_s: float, admitted: list[Run]) -> None:
        """Append what passes of a run (packets of ``size`` bytes) to ``admitted``, without MACs if it ends here.
        Packets in transit from satellites pass unchecked.
        """
        sky = header_start(view)
        if len(view) < sky + SKY_BYTES:
            admitted.append((view, size))  # malformed: the machine counts it
            return
        to_me = view[sky + 4 : sky + 8] == self._here
        command = bool(view[0] & COMMAND_BIT)
        if not isinstance(source, SatelliteId):
            if command:
                keep = self._check_ground_commands(view, size, source, now_s)
            else:  # ground hosts send no answers: an answer from there would be mistaken for another satellite's
                keep = bytes(-(-len(view) // size))
                self._count_and_refuse(view, size, keep, source, now_s)
        elif to_me and command:
            keep = self._check_commands(view, size, source, now_s)
            self._has_authentic_command |= any(keep)
        elif to_me and self._authority.every_packet:
            keep, wrong = check_answers(self._authority, view, size)
            self._counters.add("packets_received", len(wrong))
            count_wrong(self._counters, wrong)
        else:
            admitted.append((view, size))
            return
        admitted += plain_run(view, size, sky, keep) if to_me else kept_runs(view, size, keep)

    def _check_ground_commands(self, view: memoryview, size: int, source: LinkEnd, now_s: float) -> bytes:
        """Refuse commands overheard in another beam: a repeater would get their answers."""
        starts = range(0, len(view), size)
        ours = bytes(view[at:][_SOURCE] == self._our_beam for at in starts)
        if all(ours):
            return self._check_commands(view, size, source, now_s)
        keep = bytearray()
        for at, mine in zip(starts, ours, strict=True):
            packet = view[at : at + size]
            if mine:
                keep += self._check_commands(packet, len(packet), source, now_s)
            else:
                keep += b"\0"
                self._count_and_refuse(packet, len(packet), b"\0", source, now_s)
        return bytes(keep)

    def _check_commands(self, view: memoryview, size: int, source: LinkEnd, now_s: float) -> bytes:
        """Return 1 for each authentic, current and new command, otherwise 0; refuse those not authentic."""
        authority, keys = self._authority, self._authority.mac_keys
        by_now = native.check_macs(view, size, COMMAND_BYTES, keys, microseconds(now_s), _MAX_SKEW_US)
        times = by_now
        # Not by a wall clock from before the start, when a new command looks like a replay.
        if authority.wall_shift_s and None in by_now and now_s + authority.wall_shift_s > self._began_s:
            wall_us = microseconds(now_s + authority.wall_shift_s)
            by_wall = native.check_macs(view, size, COMMAND_BYTES, keys, wall_us, _MAX_SKEW_US)
            times = [wall if now is None else now for now, wall in zip(by_now, by_wall, strict=True)]
        authentic = bytes(sent_us is not None for sent_us in times)
        keep = bytearray(authentic)
        for number, sent_us in enumerate(times):
            if sent_us is not None:
                packet = view[number * size : (number + 1) * size]
                sequence = int.from_bytes(packet[2:4], "big") & 0x3FFF
                keep[number] = self._window.first(_sender(packet), stamp(sent_us, sequence))
                if keep[number] and by_now[number] is not None:
                    authority.heard_s = now_s
                elif keep[number] and authority.wall_shift_s > 0 and now_s > authority.heard_s + ALONE_S:
                    authority.heard_by_wall = True
        replayed = sum(authentic) - sum(keep)
        if replayed:
            self._counters.add("packets_received", replayed)
            self._counters.add("packets_replayed", replayed)
        if not all(authentic):
            self._count_and_refuse(view, size, authentic, source, now_s)
        return bytes(keep)

    def _may_be_exchanged(self, packet: memoryview, now_s: float) -> bool:
        """Return True if a SET may fail its MAC only because its payload was altered. It is not refused: that would end
        the operation, which is to be repeated.
        """
        sky = packet[COMMAND_BYTES:]
        if not self._authority.covers_payloads or sky[1] != Op.SET or not claims_mac(packet, COMMAND_BYTES):
            return False
        if len(sky) - SKY_BYTES - CHUNK_REF_BYTES - MAC_BYTES > MAX_SIGNED_CHUNK_BYTES:
            return False
        low = int.from_bytes(sky[TIMESTAMP_OFFSET : TIMESTAMP_OFFSET + 4], "big")
        clocks_us = (microseconds(now_s + shift_s) for shift_s in (0.0, self._authority.wall_shift_s))
        is_current = any(abs((low - us + (1 << 31)) % (1 << 32) - (1 << 31)) <= _MAX_SKEW_US for us in clocks_us)
        return is_current and _sender(packet)[0] in self._authority.mac_keys

    def _count_and_refuse(self, view: memoryview, size: int, keep: bytes, source: LinkEnd, now_s: float) -> None:
        """Count packets not admitted (``keep`` 0), and refuse a ground host's first intact command among them."""
        packets = [view[number * size : (number + 1) * size] for number, is_kept in enumerate(keep) if not is_kept]
        self._counters.add("packets_received", len(packets))
        valid = [packet for packet in count_wrong(self._counters, packets) if not self._may_be_exchanged(packet, now_s)]
        if (
            valid
            and valid[0][0] & COMMAND_BIT
            and not isinstance(source, SatelliteId)
            and self._may_answer_refusal(now_s)
        ):
            self._refuse(valid[0], source, now_s)

    def _may_answer_refusal(self, now_s: float) -> bool:
        now_us = microseconds(now_s)
        answered_to_us = max(self._answered_to_us, now_us) + 1_000_000 // REFUSALS_PER_S
        if answered_to_us > now_us + 1_000_000:
            return False
        self._answered_to_us = answered_to_us
        return True


def _sender(packet: bytes | memoryview) -> Sender:
    source, ground = (int.from_bytes(packet[COMMAND_BYTES + at : COMMAND_BYTES + at + 4], "big") for at in (8, 12))
    key_at = COMMAND_BYTES + KEY_ID_OFFSET
    return int.from_bytes(packet[key_at : key_at + 2], "big"), ground, 0 if ground else source


def count_wrong(counters: Counters, packets: list[memoryview]) -> list[memoryview]:
    """Count damaged packets as malformed, sound packets (returned) as refused."""
    if not packets:
        return []
    valid = [packet for packet in packets if native.verify_segments(packet, max(1, len(packet))) == b"\0"]
    counters.add("packets_malformed", len(packets) - len(valid))
    counters.add("packets_refused", len(valid))
    return valid


def check_answers(authority: Authority, view: memoryview, size: int) -> tuple[bytes, list[memoryview]]:
    """Return 1 or 0 for each telemetry packet, and the packets that are not authentic. Replays are not checked."""
    times = native.check_macs(view, size, TELEMETRY_BYTES, authority.mac_keys, 0, 0)
    wrong = [view[number * size : (number + 1) * size] for number, time in enumerate(times) if time is None]
    return bytes(time is not None for time in times), wrong


def plain_run(view: memoryview, size: int, sky: int, keep: bytes) -> list[Run]:
    if not any(keep):
        return []
    return [(memoryview(native.strip_macs(view, size, sky, keep)), min(size, len(view)) - MAC_BYTES)]


def kept_runs(view: memoryview, size: int, keep: bytes) -> list[Run]:
    if all(keep):
        return [(view, size)]
    packets = (view[number * size : (number + 1) * size] for number, is_kept in enumerate(keep) if is_kept)
    return [(packet, len(packet)) for packet in packets]


def answer_number(answer: Buffer) -> int:
    head = memoryview(answer)
    return stamp(int.from_bytes(head[6:12], "big"), int.from_bytes(head[2:4], "big") & 0x3FFF)


class ClientGate:
    """Gate of a ground host: admits only authentic answers, if satellites sign them, and DATA if it carries no MACs.

    ``refusals_unproved`` counts refusals by strangers or other keys.
    """

    def __init__(self, authority: Authority, counters: Counters) -> None:
        self._authority = authority
        self._counters = counters

    @property
    def admits_plain_data(self) -> bool:
        return not self._authority.every_packet

    def admit(self, runs: list[Run]) -> list[Run]:
        admitted: list[Run] = []
        for view, size in runs:
            if size <= 0 or native.same_journey(view, size):
                self._admit_run(view, size, admitted)
            else:
                for at in range(0, len(view), size):
                    self._admit_run(view[at : at + size], size, admitted)
        return admitted

    def _admit_run(self, view: memoryview, size: int, admitted: list[Run]) -> None:
        """Append a run's authentic packets, without MACs, to ``admitted``; plain DATA passes unchecked if DATA carries
        no MACs.
        """
        if size <= 0 or len(view) <= _STATUS_AT:
            admitted.append((view, size))  # malformed: the machine counts it
        elif self.admits_plain_data and not view[0] & COMMAND_BIT and view[_ANSWER_AT] == Op.DATA:
            admitted.append((view, size))
        else:
            keep, wrong = check_answers(self._authority, view, size)
            for packet in count_wrong(self._counters, wrong):
                if (packet[_ANSWER_AT], packet[_STATUS_AT]) == (Op.UNREACHABLE, Status.REFUSED):
                    self._counters.add("refusals_unproved")
            admitted += plain_run(view, size, TELEMETRY_BYTES, keep)
