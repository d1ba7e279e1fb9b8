"""Values sealed for one tenant: what any tier below stores is AES-256-GCM ciphertext, opened only under his key.

A sealed value is ``magic "SKYE" 4 | version 1 | zero 1 | key id 2 | nonce 12 | ciphertext | tag 16``, big-endian. The
20 bytes in front and the 32-byte key it is stored under are authenticated with it: a value moved to another key is not
opened. A later version keeps the magic and the version's place. It is sealed whole, before it is cut into chunks, so no
satellite and no link ever sees what is in it.

The nonce is 96 random bits for each value, also when the same key is stored again. One key seals at most 2^32 values
(NIST SP 800-38D, 8.3), 12 PB of blocks of 2.9 MB: rotate it before.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skymemory.errors import InvalidInput, MissingExtra
from skymemory.forks import Owner
from skymemory.keys import KeyRing
from skymemory.kv.value import LATER_VERSION
from skymemory.metrics import Counters
from skymemory.store.base import (
    Buffer,
    KeyReport,
    LoadReport,
    LoadTicket,
    Places,
    Store,
    StoreTicket,
    check_items,
)
from skymemory.store.buffer_pool import BufferPool
from skymemory.store.wrappers import Wrapped

NONCE_BYTES, TAG_BYTES = 12, 16
_MAGIC, _VERSION = b"SKYE", 1
_HEAD = struct.Struct(f">4sBBH{NONCE_BYTES}s")
OVERHEAD_BYTES = _HEAD.size + TAG_BYTES
"""By how much a sealed value is longer."""
NOT_AUTHENTIC = "not authentic"
"""The reason of a miss where a value was there and could not be opened: another tenant's, or tampered with, or its key
was retired.
"""
UNKNOWN_KEY = "unknown key"
"""The reason of a miss where the key that the value names has not come here yet: it stays, for those who have it."""
_PURPOSE = b"skymemory payloads 1"


@dataclass(slots=True)
class _Sealed:
    """A store ticket's own state: the ticket below, and the buffer the ciphertext is in."""

    below: StoreTicket
    room: Any


def is_sealed(value: Buffer) -> bool:
    """Whether these bytes look like a sealed value: by their first ones, not by their seal."""
    return bytes(value[: len(_MAGIC)]) == _MAGIC


class SealedStore(Wrapped):
    """Any store, its values sealed, under the same keys. ``ring`` gives the tenant's keys at each use: they may change.

    Raises:
        MissingExtra: the ``cryptography`` library is not installed.
    """

    def __init__(self, store: Store, ring: Callable[[], KeyRing], now_s: Callable[[], float]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise MissingExtra("sealed values need the extra 'secure': pip install 'skymemory[secure]'") from error
        self._cipher, self._invalid = AESGCM, (InvalidTag, ValueError)
        super().__init__(store)
        self._ring = ring
        self._now_s = now_s
        self._ciphers: dict[bytes, Any] = {}
        self._buffers = BufferPool()
        self._counters = Counters()
        self._owner = Owner(f"the sealed {store.name} store")

    # --- sealing and opening ---

    def _cipher_of(self, secret: bytes) -> Any:
        """The cipher of a key; a few are kept, for setting one up costs as much as a small value."""
        found = self._ciphers.get(secret)
        if found is None:
            if len(self._ciphers) > 16:
                self._ciphers.clear()
            found = self._ciphers[secret] = self._cipher(secret)
        return found

    def _seal(self, key: bytes, value: memoryview, out: memoryview) -> None:
        """Into ``out``, which is ``OVERHEAD_BYTES`` longer than ``value``."""
        secret = self._ring().active(self._now_s())
        nonce = os.urandom(NONCE_BYTES)
        head = _HEAD.pack(_MAGIC, _VERSION, 0, secret.key_id, nonce)
        out[: len(head)] = head
        self._cipher_of(secret.derive(_PURPOSE)).encrypt_into(nonce, value, head + key, out[len(head) :])

    def _open(self, key: bytes, sealed: memoryview, out: memoryview) -> str:
        """Into ``out``, which is ``OVERHEAD_BYTES`` shorter. Why that could not be, or empty."""
        if is_sealed(sealed) and bytes(sealed[4:5]) > bytes([_VERSION]):
            return LATER_VERSION
        if len(sealed) < OVERHEAD_BYTES:
            return NOT_AUTHENTIC
        head = bytes(sealed[: _HEAD.size])
        magic, version, zero, key_id, nonce = _HEAD.unpack(head)
        if (magic, version, zero) != (_MAGIC, _VERSION, 0):
            return NOT_AUTHENTIC
        ring = self._ring()
        secret = ring.find(key_id)
        if secret is None:
            return UNKNOWN_KEY if ring.may_come(key_id) else NOT_AUTHENTIC
        try:
            self._cipher_of(secret.derive(_PURPOSE)).decrypt_into(nonce, sealed[_HEAD.size :], head + key, out)
        except self._invalid:
            return NOT_AUTHENTIC
        return ""

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
            room = self._buffers.take(sum(max(0, len(value) - OVERHEAD_BYTES) for value in values.values()))
            opened, rejected, at = dict[bytes, memoryview](), dict[bytes, str](), 0
            for key, value in values.items():
                out = room.data[at : at + max(0, len(value) - OVERHEAD_BYTES)]
                at += len(out)
                if reason := self._open(key, value, out):
                    rejected[key] = reason
                else:
                    opened[key] = out.toreadonly()
        finally:
            self.store.release(below)
        ticket.state = room
        self._counters.add("values_opened", len(opened))
        reasons = list(rejected.values())
        self._counters.add("values_not_authentic", reasons.count(NOT_AUTHENTIC))
        self._counters.add("values_unknown_key", reasons.count(UNKNOWN_KEY))
        self._counters.add("values_later_version", reasons.count(LATER_VERSION))
        ticket.report = self._report(below.report, opened, rejected, ticket.keys)
        return [opened.get(key) for key in ticket.keys]

    @staticmethod
    def _report(
        report: LoadReport | None, opened: dict[bytes, memoryview], rejected: dict[bytes, str], keys: tuple[bytes, ...]
    ) -> LoadReport | None:
        """That of the tier below, in bytes of the values themselves."""
        if report is None:
            return None
        told = (
            KeyReport(seconds=told.seconds, retransmitted=told.retransmitted, reason=rejected[key])
            if key in rejected
            else replace(told, size_bytes=len(opened[key]))
            if key in opened
            else told
            for key, told in zip(keys, report.keys, strict=True)
        )
        return replace(report, keys=tuple(told))

    def release(self, ticket: LoadTicket) -> None:
        state, ticket.state = ticket.state, None
        if isinstance(state, LoadTicket):
            self.store.release(state)
        elif state is not None:
            self._buffers.give_back(state)  # type: ignore[arg-type]

    # --- storing ---

    def prepare_store(self, items: Sequence[tuple[bytes, Buffer]], places: Places = ()) -> StoreTicket:
        self._owner.check()
        items = check_items(items)
        views = [(key, memoryview(value).cast("B")) for key, value in items]
        room = self._buffers.take(sum(len(value) + OVERHEAD_BYTES for _, value in views))
        sealed, at = [], 0
        for key, value in views:
            out = room.data[at : at + len(value) + OVERHEAD_BYTES]
            at += len(out)
            self._seal(key, value, out)
            sealed.append((key, out))
        below = self.store.prepare_store(sealed, places)
        return StoreTicket(items, below.expires_s, state=_Sealed(below, room), places=below.places)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        state = ticket.state
        if not isinstance(state, _Sealed):
            raise InvalidInput("this store ticket is not open: each is completed once, by its own store")
        ticket.state = None
        stored = self.store.complete_store(state.below)
        self._buffers.give_back(state.room)
        ticket.seconds, ticket.state = state.below.seconds, state.below.state
        ticket.unanswered = state.below.unanswered
        self._counters.add("values_sealed", sum(stored))
        return stored

    def stats(self) -> dict[str, int | float]:
        return {**self.store.stats(), **self._counters.as_dict()}
