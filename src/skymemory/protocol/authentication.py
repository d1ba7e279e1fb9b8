"""MACs of packets: by which key they are made and checked. What is signed is a plain packet; past a gate it is again.

An authenticated packet is the plain one with flag 0x01 and the key's id in its SKY header, and 16 bytes more at the end
of its body: HMAC-SHA-256, cut to 16 bytes, over the high half of the sender's time in microseconds (4 bytes, not sent:
the receiver knows it within 35 minutes) and the packet up to there, its CRC and what forwarders change taken as zero.
The payload of SET, MIGRATE and DATA follows behind and is not covered, as the header CRC does not cover it: the chunk
reference is, and with it key, number, length and CRC-32. Nobody who forwards or stores rereads a payload; that it is
what its writer wrote is for the writer's tenant to know (``store.sealed``), who shares no key with satellites.
The loops are ``native.sign_packets``, ``check_macs`` and ``strip_macs``.
"""

from __future__ import annotations

from dataclasses import dataclass

from skymemory import native
from skymemory.errors import ValueTooLarge
from skymemory.keys import KeyRing
from skymemory.protocol.segments import SegmentBatch
from skymemory.protocol.space_packet import COMMAND_BYTES, MAX_PACKET_BYTES, TELEMETRY_BYTES
from skymemory.protocol.wire import MAX_CHUNK_BYTES, Op

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
