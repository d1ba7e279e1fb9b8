"""Authentication of packets: MACs made and checked, replays refused; past the gate a packet is a plain one again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ValueTooLarge
from skymemory.keys import KeyRing
from skymemory.metrics import Counters
from skymemory.native import Run
from skymemory.protocol.routing import LinkEnd, header_start, same_journey
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.wire import (
    COMMAND_BYTES,
    GROUND_SHELL,
    MAX_CHUNK_BYTES,
    MAX_PACKET_BYTES,
    SKY_BYTES,
    TELEMETRY_BYTES,
    Address,
    Op,
)

# MACs of packets: by which key they are made and checked. What is signed is a plain packet; past a gate it is again.
#
# An authenticated packet is the plain one with flag 0x01 and the key's id in its SKY header, and 16 bytes more at the
# end
# of its body: HMAC-SHA-256, cut to 16 bytes, over the high half of the sender's time in microseconds (4 bytes, not
# sent:
# the receiver knows it within 35 minutes) and the packet up to there, its CRC and what forwarders change taken as
# zero.
# The payload of SET, MIGRATE and DATA follows behind and is not covered, as the header CRC does not cover it: the
# chunk
# reference is, and with it key, number, length and CRC-32. Nobody who forwards or stores rereads a payload; that it is
# what its writer wrote is for the writer's tenant to know (``store.sealed``), who shares no key with satellites.
# The loops are ``native.sign_packets``, ``check_macs`` and ``strip_macs``.


FLAG_AUTHENTICATED = 0x01
MAC_BYTES = 16
FLAGS_OFFSET, KEY_ID_OFFSET = 2, 38
"""Within the SKY header."""
MAX_SIGNED_CHUNK_BYTES = MAX_CHUNK_BYTES - MAC_BYTES
"""The largest chunk where packets carry a MAC (65,359 bytes)."""
CARRIERS = (Op.SET, Op.MIGRATE, Op.DATA)
"""Operations with a payload behind the body."""

_PURPOSE = b"skymemory packets 1"
_COMMAND_BIT = 0x10


@dataclass(slots=True)
class Authority:
    """Who may command: a ring that may be replaced at any time. ``every_packet``: answers carry a MAC too."""

    ring: KeyRing
    every_packet: bool = False
    _keys: tuple[KeyRing, dict[int, bytes]] | None = None

    @property
    def mac_keys(self) -> dict[int, bytes]:
        """The keys that are accepted, derived for MACs, by their id."""
        if self._keys is None or self._keys[0] is not self.ring:
            ring = self.ring
            self._keys = (ring, {key.key_id: key.derive(_PURPOSE) for key in ring.keys})
        return self._keys[1]

    def sign(self, batch: SegmentBatch, now_s: float) -> SegmentBatch:
        """The packets of a batch (plain and sealed, each row one packet) with MACs. Commands get ``now_s`` as time.

        Raises:
            ValueTooLarge: a chunk so large that its packet has no room for a MAC.
        """
        command = bool(batch.headers[0] & _COMMAND_BIT)
        if not (command or self.every_packet):
            return batch
        keys, key_id = self.mac_keys, self.ring.active(now_s).key_id
        sky = COMMAND_BYTES if command else TELEMETRY_BYTES
        time_us, width = int(now_s * 1e6) if command else 0, batch.header_bytes
        try:
            signed = native.sign_packets(batch.headers, width, sky, keys[key_id], key_id, time_us)
        except ValueError as error:
            raise ValueTooLarge(
                f"{error}: at most {MAX_PACKET_BYTES} bytes with it; use chunks of {MAX_SIGNED_CHUNK_BYTES} at most"
            ) from None
        return SegmentBatch(signed, width + MAC_BYTES, batch.payloads)


def claims_mac(packet: memoryview, sky: int) -> bool:
    """Whether the packet, which has a whole SKY header, says that it carries a MAC."""
    return bool(packet[sky + FLAGS_OFFSET] & FLAG_AUTHENTICATED)


# Which authenticated commands have been here before: a bounded window per sender.
#
# Every command that a sender transmits has a number of its own, greater than all before: its time in microseconds,
# then
# the 14 bits of its sequence count. A retransmission is made anew, so it has a new number and passes; the very bytes
# of
# an earlier packet do not, whoever sends them again.


MAX_SKEW_S = 30.0
"""A command whose time differs more than this from the receiver's is refused: so old ones need not be remembered."""
REMEMBERED = 2048
"""Numbers remembered of one sender, in each of two generations; what is older than all of them is refused."""
MAX_SENDERS = 256
"""Senders of whom so much is remembered; of others that were here before only the newest number."""
MAX_FORGOTTEN = 4096
"""Those others. They are kept for as long as the check of its time would let a copy of theirs pass: who is refused for
what another has sent would be refused without a reason that he could know, wherever his clock is behind by a little.
"""
START_GRACE_S = 1.0
"""A receiver that starts takes what was made so shortly before: its neighbours start when it does, and greet it."""
_SEQUENCE_BITS = 14
_PASSED_US = int(2 * MAX_SKEW_S * 1e6)
"""A number that much below another that was taken is too old by any receiver's clock: the other is 30 s ahead at most.
"""

Sender = tuple[int, int, int]
"""Key id, ground host, and where that is 0 the packed address of a satellite."""


def stamp(time_us: int, sequence_count: int) -> int:
    """The number of a command: unique per sender, ascending."""
    return time_us << _SEQUENCE_BITS | sequence_count


class _Seen:
    """What one sender has sent: everything up to ``floor`` counts as seen."""

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
        self._took(number)
        return True

    def all_first(self, numbers: list[int]) -> bool:
        distinct = set(numbers)
        new = len(distinct) == len(numbers) > 0 and min(numbers) > self.floor
        if not (new and distinct.isdisjoint(self.recent) and distinct.isdisjoint(self.earlier)):
            return False
        self.recent |= distinct
        self._took(max(numbers))
        return True

    def _took(self, newest: int) -> None:
        self.newest = max(self.newest, newest)
        if len(self.recent) >= REMEMBERED:
            if self.earlier:
                self.floor = max(self.floor, max(self.earlier))
            self.earlier, self.recent = self.recent, set()


class ReplayWindow:
    """One receiver's memory. It knows nothing from before ``start_us`` and refuses what was made before then."""

    def __init__(self, start_us: int) -> None:
        self._floor = stamp(start_us, 0) - 1
        self._senders: OrderedDict[Sender, _Seen] = OrderedDict()
        self._forgotten: OrderedDict[Sender, int] = OrderedDict()
        """The newest numbers of senders that were not heard lately, the first to be forgotten first."""

    def first(self, sender: Sender, number: int) -> bool:
        """Whether this command, authentic and recent, is here for the first time; it is remembered."""
        return self._seen(sender).first(number)

    def all_first(self, sender: Sender, numbers: list[int]) -> bool:
        """Whether all these are here for the first time, and differ: then they are remembered; if not, none is."""
        return self._seen(sender).all_first(numbers)

    def _seen(self, sender: Sender) -> _Seen:
        seen = self._senders.get(sender)
        if seen is None:
            seen = self._senders[sender] = _Seen(max(self._floor, self._forgotten.pop(sender, self._floor)))
            if len(self._senders) > MAX_SENDERS:
                self._forget(*self._senders.popitem(last=False))
        else:
            self._senders.move_to_end(sender)
        return seen

    def _forget(self, sender: Sender, seen: _Seen) -> None:
        """Of this one, all up to its newest number is refused from now on; of all where there are too many."""
        self._forgotten[sender] = seen.newest
        passed = seen.newest - stamp(_PASSED_US, 0)
        while len(self._forgotten) > MAX_FORGOTTEN or next(iter(self._forgotten.values())) < passed:
            self._floor = max(self._floor, self._forgotten.popitem(last=False)[1])


Refuse = Callable[[memoryview, LinkEnd, float], None]
"""Told of a sound command of a ground host's that was refused, the link it came by, and the time."""

REFUSALS_PER_S = 100
"""So many ground hosts (as many at once after a rest) are told that they are refused; a flood gets no more words."""
_MAX_SKEW_US = int(MAX_SKEW_S * 1e6)
_SOURCE = slice(COMMAND_BYTES + 8, COMMAND_BYTES + 12)


class SatelliteGate:
    """The gate of one satellite. It counts ``packets_refused``, ``packets_replayed`` and ``packets_malformed``, and as
    ``packets_received`` what it does not let in.
    """

    def __init__(self, authority: Authority, here: Address, counters: Counters, refuse: Refuse, now_s: float) -> None:
        self._authority = authority
        self._here = here.pack().to_bytes(4, "big")
        self._our_beam = Address(here.plane, here.slot, GROUND_SHELL).pack().to_bytes(4, "big")
        self._counters = counters
        self._refuse = refuse
        self._window = ReplayWindow(int((now_s - START_GRACE_S) * 1e6))
        self._commanded = False
        self._told_to_s = now_s
        """When all that we have said to the refused would be said at ``REFUSALS_PER_S``."""

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
        """For ``native.serve``, until the machine is next called: GETs and SETs by our own beam are checked there."""
        return self._authority.mac_keys, int(now_s * 1e6), _MAX_SKEW_US, self._are_first

    def _are_first(self, head: bytes, sent_us: int, sequences: list[int]) -> bool:
        return self._window.all_first(_sender(head), [stamp(sent_us, sequence) for sequence in sequences])

    def admit(self, runs: list[Run], source: LinkEnd, now_s: float) -> tuple[list[Run], bool]:
        """What may come in of the runs from one link, in their order, ours as plain packets; and whether an authentic
        command for us was among it: only then is it sure who is at the other end.
        """
        admitted: list[Run] = []
        self._commanded = False
        for view, size in runs:
            if size > 0 and same_journey(view, size):
                self._admit(view, size, source, now_s, admitted)
            else:
                for at in range(0, len(view), size) if size > 0 else ():
                    self._admit(view[at : at + size], size, source, now_s, admitted)
        return admitted, self._commanded

    def _admit(self, view: memoryview, size: int, source: LinkEnd, now_s: float, admitted: list[Run]) -> None:
        """Packets of one operation for one destination."""
        sky = header_start(view)
        if len(view) < sky + SKY_BYTES:
            admitted.append((view, size))  # malformed, as the machine will find
            return
        to_me = view[sky + 4 : sky + 8] == self._here
        command = bool(view[0] & _COMMAND_BIT)
        if not isinstance(source, SatelliteId):
            if command:
                keep = self._from_ground(view, size, source, now_s)
            else:  # no ground host has answers to give: whoever sends some would have them taken for another's
                keep = bytes(-(-len(view) // size))
                self._turn_away(view, size, keep, source, now_s)
        elif to_me and command:
            keep = self._authentic(view, size, source, now_s)
            self._commanded |= any(keep)
        elif to_me and self._authority.every_packet:
            keep, wrong = check_answers(self._authority, view, size)
            self._counters.add("packets_received", len(wrong))
            count_wrong(self._counters, wrong)
        else:
            admitted.append((view, size))
            return
        admitted += plain_run(view, size, sky, keep) if to_me else kept_runs(view, size, keep)

    def _from_ground(self, view: memoryview, size: int, source: LinkEnd, now_s: float) -> bytes:
        """Commands by our beam. One that was made for another satellite's beam was overheard there: to take it would be
        to send its answers to whoever repeats it here.
        """
        starts = range(0, len(view), size)
        ours = bytes(view[at:][_SOURCE] == self._our_beam for at in starts)
        if all(ours):
            return self._authentic(view, size, source, now_s)
        keep = bytearray()
        for at, mine in zip(starts, ours, strict=True):
            packet = view[at : at + size]
            if mine:
                keep += self._authentic(packet, len(packet), source, now_s)
            else:
                keep += b"\0"
                self._turn_away(packet, len(packet), b"\0", source, now_s)
        return bytes(keep)

    def _authentic(self, view: memoryview, size: int, source: LinkEnd, now_s: float) -> bytes:
        """1 for each packet that is authentic and new; the others are counted."""
        times = native.check_macs(view, size, COMMAND_BYTES, self._authority.mac_keys, int(now_s * 1e6), _MAX_SKEW_US)
        authentic = bytes(sent_us is not None for sent_us in times)
        keep = bytearray(authentic)
        for number, sent_us in enumerate(times):
            if sent_us is not None:
                packet = view[number * size : (number + 1) * size]
                sequence = int.from_bytes(packet[2:4], "big") & 0x3FFF
                keep[number] = self._window.first(_sender(packet), stamp(sent_us, sequence))
        replayed = sum(authentic) - sum(keep)
        if replayed:
            self._counters.add("packets_received", replayed)
            self._counters.add("packets_replayed", replayed)
        if not all(authentic):
            self._turn_away(view, size, authentic, source, now_s)
        return bytes(keep)

    def _turn_away(self, view: memoryview, size: int, keep: bytes, source: LinkEnd, now_s: float) -> None:
        """Damaged packets are dropped as ever; of sound commands a ground host is told, once a run."""
        packets = [view[number * size : (number + 1) * size] for number, kept in enumerate(keep) if not kept]
        self._counters.add("packets_received", len(packets))
        sound = count_wrong(self._counters, packets)
        if sound and sound[0][0] & _COMMAND_BIT and not isinstance(source, SatelliteId) and self._may_tell(now_s):
            self._refuse(sound[0], source, now_s)

    def _may_tell(self, now_s: float) -> bool:
        said_to_s = max(self._told_to_s, now_s) + 1 / REFUSALS_PER_S
        if said_to_s > now_s + 1.0:
            return False
        self._told_to_s = said_to_s
        return True


def _sender(packet: bytes | memoryview) -> Sender:
    source, ground = (int.from_bytes(packet[COMMAND_BYTES + at : COMMAND_BYTES + at + 4], "big") for at in (8, 12))
    key_at = COMMAND_BYTES + KEY_ID_OFFSET
    return int.from_bytes(packet[key_at : key_at + 2], "big"), ground, 0 if ground else source


def count_wrong(counters: Counters, packets: list[memoryview]) -> list[memoryview]:
    """Count packets that are not authentic: the damaged as malformed, the sound, which are returned, as refused."""
    if not packets:
        return []
    sound = [packet for packet in packets if native.verify_segments(packet, max(1, len(packet))) == b"\0"]
    counters.add("packets_malformed", len(packets) - len(sound))
    counters.add("packets_refused", len(sound))
    return sound


def check_answers(authority: Authority, view: memoryview, size: int) -> tuple[bytes, list[memoryview]]:
    """1 for each authentic one of some telemetry packets, and the others. An answer needs no window: it counts only
    as long as its request is open, and only once.
    """
    times = native.check_macs(view, size, TELEMETRY_BYTES, authority.mac_keys, 0, 0)
    wrong = [view[number * size : (number + 1) * size] for number, time in enumerate(times) if time is None]
    return bytes(time is not None for time in times), wrong


def plain_run(view: memoryview, size: int, sky: int, keep: bytes) -> list[Run]:
    """The packets to keep, which are authentic, without their MACs, as one run: the last alone may be shorter."""
    if not any(keep):
        return []
    return [(memoryview(native.strip_macs(view, size, sky, keep)), min(size, len(view)) - MAC_BYTES)]


def kept_runs(view: memoryview, size: int, keep: bytes) -> list[Run]:
    """The packets to keep, as they are."""
    if all(keep):
        return [(view, size)]
    packets = (view[number * size : (number + 1) * size] for number, kept in enumerate(keep) if kept)
    return [(packet, len(packet)) for packet in packets]


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
            keep, wrong = check_answers(self._authority, view, size)
            count_wrong(self._counters, wrong)
            admitted += plain_run(view, size, TELEMETRY_BYTES, keep)
        return admitted
