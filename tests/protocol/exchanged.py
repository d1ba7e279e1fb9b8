"""Payloads exchanged for others of the same CRC-32, as an attacker on the way would."""

from __future__ import annotations

import random
import zlib
from collections import Counter

from skymemory.protocol.auth import MAC_BYTES
from skymemory.protocol.wire import COMMAND_PREFIX_BYTES, Op
from skymemory.transport.faults import FaultInjector

_CRC_POLYNOMIAL = (1 | 0xEDB88320 << 1).to_bytes(5, "little")
"""All 33 coefficients: a CRC does not see a multiple of its polynomial."""
_OP_AT, _MAC_END = 9, COMMAND_PREFIX_BYTES + 72 + MAC_BYTES


def exchanged(payload: bytes, at: int = 0) -> bytes:
    """Other bytes of the same length and CRC-32; they differ in five, from ``at`` on."""
    changed = bytearray(payload)
    for offset, byte in enumerate(_CRC_POLYNOMIAL, at):
        changed[offset] ^= byte
    assert changed != payload and zlib.crc32(changed) == zlib.crc32(payload)
    return bytes(changed)


class PayloadExchanger(FaultInjector):
    """Exchanges the payloads of some SETs and MIGRATEs on their way, which have MACs; counts them by operation."""

    def __init__(self, share: float, seed: int = 0) -> None:
        super().__init__(loss=1e-9)  # or no datagram would be shown to it
        self.count = Counter[int]()
        self._share, self._dice = share, random.Random(seed)
        self._made: set[bytes] = set()

    def apply(self, data: bytes) -> list[tuple[bytes, float]]:
        op, payload = data[_OP_AT] if data[0] & 0x10 else 0, bytes(data[_MAC_END:])
        passed_before = payload in self._made  # on its way over several links
        if op in (Op.SET, Op.MIGRATE) and len(payload) >= 5 and not passed_before and self._dice.random() < self._share:
            self.count[op] += 1
            payload = exchanged(payload, self._dice.randrange(len(payload) - 4))
            self._made.add(payload)
            data = data[:_MAC_END] + payload
        return [(data, 0.0)]
