"""Values sealed for a tenant: the tier below stores AES-256-GCM ciphertext that only the tenant's key opens.

A sealed value is ``magic "SKYE" 4 | version 1 | zero 1 | key id 2 | nonce 12 | ciphertext | tag 16``, big-endian. The
first 20 bytes and the value's 32-byte key are authenticated. Later versions keep magic and version's position. The
nonce is random: a secret seals at most 2^32 values (NIST SP 800-38D, 8.3), 12 PB of blocks of 2.9 MB.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skymemory.errors import InvalidInput, missing_extra
from skymemory.forks import Owner
from skymemory.keys import KeyRing
from skymemory.metrics import Counters
from skymemory.reasons import Miss
from skymemory.store.base import (
    Buffer,
    BufferPool,
    KeyReport,
    LoadReport,
    LoadTicket,
    Places,
    Store,
    StoreTicket,
    check_items,
)
from skymemory.store.wrappers import Wrapped

NONCE_BYTES, TAG_BYTES = 12, 16
_MAGIC, _VERSION = b"SKYE", 1
_HEAD = struct.Struct(f">4sBBH{NONCE_BYTES}s")
OVERHEAD_BYTES = _HEAD.size + TAG_BYTES

_PURPOSE = b"skymemory payloads 1"


@dataclass(slots=True)
class _Sealed:
    """Ticket below, and the buffer of encrypted values."""

    below: StoreTicket
    buffer: Any


def is_sealed(value: Buffer) -> bool:
    """Return True if a value looks sealed, unauthenticated."""
    return bytes(value[: len(_MAGIC)]) == _MAGIC


class SealedStore(Wrapped):
    """Wrapper that seals a store's values. ``ring`` is called at each use. Raises MissingExtra without
    ``cryptography``.
    """

    def __init__(self, store: Store, ring: Callable[[], KeyRing], now_s: Callable[[], float]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise missing_extra("a store with sealed values", "cryptography", "secure") from error
        self._cipher, self._invalid = AESGCM, (InvalidTag, ValueError)
        super().__init__(store)
        self._ring = ring
        self._now_s = now_s
        self._ciphers: dict[bytes, Any] = {}  # by secret
        self._buffers = BufferPool()
        self._counters = Counters()
        self._owner = Owner(f"the sealed {store.name} store")

    # --- sealing and opening ---

    def _cipher_of(self, secret: bytes) -> Any:
        cipher = self._ciphers.get(secret)
        if cipher is None:
            if len(self._ciphers) > 16:
                self._ciphers.clear()
            cipher = self._ciphers[secret] = self._cipher(secret)  # costs as much as sealing a small value
        return cipher

    def _seal(self, key: bytes, value: memoryview, out: memoryview) -> None:
        secret = self._ring().active(self._now_s())
        nonce = os.urandom(NONCE_BYTES)
        head = _HEAD.pack(_MAGIC, _VERSION, 0, secret.key_id, nonce)
        out[: len(head)] = head
        self._cipher_of(secret.derive(_PURPOSE)).encrypt_into(nonce, value, head + key, out[len(head) :])

    def _open(self, key: bytes, sealed: memoryview, out: memoryview) -> Miss | None:
        """Decrypt a value into ``out``; return the reason of a failure."""
        if is_sealed(sealed) and bytes(sealed[4:5]) > bytes([_VERSION]):
            return Miss.LATER_VERSION
        if len(sealed) < OVERHEAD_BYTES:
            return Miss.NOT_AUTHENTIC
        head = bytes(sealed[: _HEAD.size])
        magic, version, zero, key_id, nonce = _HEAD.unpack(head)
        if (magic, version, zero) != (_MAGIC, _VERSION, 0):
            return Miss.NOT_AUTHENTIC
        ring = self._ring()
        secret = ring.find(key_id)
        if secret is None:
            return Miss.UNKNOWN_KEY if ring.may_come(key_id) else Miss.NOT_AUTHENTIC
        try:
            self._cipher_of(secret.derive(_PURPOSE)).decrypt_into(nonce, sealed[_HEAD.size :], head + key, out)
        except self._invalid:
            return Miss.NOT_AUTHENTIC
        return None

    # --- loading ---

    def prepare_load(self, keys: Sequence[bytes]) -> LoadTicket:
        below = self.store.prepare_load(keys)
        return LoadTicket(below.keys, below.expires_s, state=below)

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        below = ticket.state
        if not isinstance(below, LoadTicket):
            raise InvalidInput("this load ticket is not open: each is completed once, by its own store")
        sealed = self.store.complete_load(below)
        try:
            values = {key: value for key, value in zip(ticket.keys, sealed, strict=True) if value is not None}
            buffer = self._buffers.take(sum(max(0, len(value) - OVERHEAD_BYTES) for value in values.values()))
            opened, rejected, at = dict[bytes, memoryview](), dict[bytes, Miss](), 0
            for key, value in values.items():
                out = buffer.data[at : at + max(0, len(value) - OVERHEAD_BYTES)]
                at += len(out)
                if reason := self._open(key, value, out):
                    rejected[key] = reason
                else:
                    opened[key] = out.toreadonly()
        finally:
            self.store.release(below)
        ticket.state = buffer
        self._counters.add("values_opened", len(opened))
        reasons = list(rejected.values())
        self._counters.add("values_not_authentic", reasons.count(Miss.NOT_AUTHENTIC))
        self._counters.add("values_unknown_key", reasons.count(Miss.UNKNOWN_KEY))
        self._counters.add("values_later_version", reasons.count(Miss.LATER_VERSION))
        ticket.report = self._report(below.report, opened, rejected, ticket.keys)
        return [opened.get(key) for key in ticket.keys]

    @staticmethod
    def _report(
        report: LoadReport | None, opened: dict[bytes, memoryview], rejected: dict[bytes, Miss], keys: tuple[bytes, ...]
    ) -> LoadReport | None:
        """Return the report from below with decrypted sizes, and ``rejected`` values as misses."""
        if report is None:
            return None
        reports = (
            KeyReport(seconds=below.seconds, retransmitted=below.retransmitted, reason=rejected[key])
            if key in rejected
            else replace(below, size_bytes=len(opened[key]))
            if key in opened
            else below
            for key, below in zip(keys, report.keys, strict=True)
        )
        return replace(report, keys=tuple(reports))

    def release(self, ticket: LoadTicket) -> None:
        state, ticket.state = ticket.state, None
        if isinstance(state, LoadTicket):
            self.store.release(state)
        elif state is not None:
            self._buffers.give_back(state)  # type: ignore[arg-type]

    # --- storing ---

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        return [None if size is None else max(0, size - OVERHEAD_BYTES) for size in self.store.sizes(keys)]

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        self._owner.check()
        items = check_items(items)
        views = [(key, memoryview(value).cast("B")) for key, value in items]
        buffer = self._buffers.take(sum(len(value) + OVERHEAD_BYTES for _, value in views))
        sealed, at = [], 0
        for key, value in views:
            out = buffer.data[at : at + len(value) + OVERHEAD_BYTES]
            at += len(out)
            self._seal(key, value, out)
            sealed.append((key, out))
        below = self.store.prepare_store(sealed, places)
        return StoreTicket(items, below.expires_s, state=_Sealed(below, buffer), places=below.places)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        state = ticket.state
        if not isinstance(state, _Sealed):
            raise InvalidInput("this store ticket is not open: each is completed once, by its own store")
        ticket.state = None
        stored = self.store.complete_store(state.below)
        self._buffers.give_back(state.buffer)
        ticket.seconds, ticket.state = state.below.seconds, state.below.state
        ticket.unanswered, ticket.reason = state.below.unanswered, state.below.reason
        self._counters.add("values_sealed", sum(stored))
        return stored

    def stats(self) -> dict[str, int | float]:
        return {**self.store.stats(), **self._counters.as_dict()}
