"""Where packets enter a machine that asks for MACs: what is authentic comes in as a plain packet, the rest is refused.

Behind the gate nothing knows of keys. A satellite's gate opens commands for it, and checks what a ground host hands it
for others before it is passed on: commands that say they came by this very beam, and nothing else. A neighbour's
packets in transit are passed on unread. A client's gate opens answers, where those carry MACs.
"""

from __future__ import annotations

from collections.abc import Callable

from skymemory import native
from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.native import Run
from skymemory.protocol.authentication import KEY_ID_OFFSET, MAC_BYTES, Authority
from skymemory.protocol.forwarding import LinkEnd, header_start, same_journey
from skymemory.protocol.replay import MAX_SKEW_S, START_GRACE_S, ReplayWindow, Sender, stamp
from skymemory.protocol.space_packet import COMMAND_BYTES, TELEMETRY_BYTES
from skymemory.protocol.wire import GROUND_SHELL, SKY_BYTES, Address

Refuse = Callable[[memoryview, LinkEnd, float], None]
"""Told of a sound command of a ground host's that was refused, the link it came by, and the time."""

REFUSALS_PER_S = 100
"""So many ground hosts (as many at once after a rest) are told that they are refused; a flood gets no more words."""
_MAX_SKEW_US = int(MAX_SKEW_S * 1e6)
_COMMAND_BIT = 0x10
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
        times = native.check_macs(
            view, size, COMMAND_BYTES, self._authority.mac_keys, int(now_s * 1e6), _MAX_SKEW_US
        )  # fmt: skip
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
