"""A satellite's memory: chunks under a byte budget, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from skymemory.protocol.messages import Presence
from skymemory.protocol.wire import CHUNK_REF_BYTES, TAG_BYTES, TAG_OFFSET, ChunkRef

ChunkName = tuple[bytes, int]
"""(key, 0-based index)."""

_VERSION = slice(48, 56)
"""Of a packed reference: length and CRC of the whole value, which tell two values of one key apart."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """``ref`` is the packed ``ChunkRef``, kept as bytes because it is sent as it came."""

    ref: bytes
    payload: bytes


@dataclass(slots=True)
class PutOutcome:
    stored: bool
    replaced: bool = False
    evicted: list[ChunkName] = field(default_factory=list)


class ChunkStore:
    """Chunks of one satellite. ``used_bytes`` counts payloads and references and never exceeds ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._recency: OrderedDict[ChunkName, StoredChunk] = OrderedDict()
        self._by_key: dict[bytes, set[int]] = {}
        self._by_tag: dict[bytes, dict[ChunkName, None]] = {}

    def __len__(self) -> int:
        return len(self._recency)

    def put(self, name: ChunkName, ref: bytes, payload: bytes) -> PutOutcome:
        """Store a chunk as the most recently used one, evicting the oldest as needed.

        Refused is a chunk that could not fit even alone (nothing is evicted for it), and one for which another chunk
        of the same value would have to go: the value does not fit, and half of it is worth nothing. Storing what is
        there already replaces it: every operation is idempotent.
        """
        size = len(payload) + CHUNK_REF_BYTES
        outcome = PutOutcome(stored=size <= self.limit_bytes)
        if not outcome.stored:
            return outcome
        if name in self._recency:
            self.remove(name)
            outcome.replaced = True
        while self.used_bytes + size > self.limit_bytes:
            oldest = next(iter(self._recency))
            if oldest[0] == name[0] and self._recency[oldest].ref[_VERSION] == ref[_VERSION]:
                outcome.stored = False
                return outcome
            self.remove(oldest)
            outcome.evicted.append(oldest)
        self._recency[name] = StoredChunk(ref, payload)
        self.used_bytes += size
        key, index = name
        held = self._by_key.get(key)
        if held is None:
            held = self._by_key[key] = set()
        held.add(index)
        tag = ref[TAG_OFFSET : TAG_OFFSET + TAG_BYTES]
        group = self._by_tag.get(tag)
        if group is None:
            group = self._by_tag[tag] = {}
        group[name] = None
        return outcome

    def get(self, name: ChunkName) -> StoredChunk | None:
        """The chunk, which becomes the most recently used; None if it is not here."""
        chunk = self._recency.get(name)
        if chunk is not None:
            self._recency.move_to_end(name)
        return chunk

    def peek(self, name: ChunkName) -> StoredChunk | None:
        """As ``get``, leaving the order of eviction alone."""
        return self._recency.get(name)

    def remove(self, name: ChunkName) -> bool:
        chunk = self._recency.pop(name, None)
        if chunk is None:
            return False
        self.used_bytes -= len(chunk.payload) + CHUNK_REF_BYTES
        key, index = name
        held = self._by_key[key]
        held.discard(index)
        if not held:
            del self._by_key[key]
        tag = chunk.ref[TAG_OFFSET : TAG_OFFSET + TAG_BYTES]
        group = self._by_tag[tag]
        del group[name]
        if not group:
            del self._by_tag[tag]
        return True

    def remove_key(self, key: bytes) -> int:
        """Remove every chunk of ``key``; how many there were."""
        indices = list(self._by_key.get(key, ()))
        for index in indices:
            self.remove((key, index))
        return len(indices)

    def presence(self, key: bytes) -> Presence | None:
        """What is held of ``key``, told by its lowest chunk."""
        held = self._by_key.get(key)
        if not held:
            return None
        index = min(held)
        ref = ChunkRef.unpack(self._recency[key, index].ref)
        return Presence(index, ref.chunks, ref.length_bytes, ref.value_bytes, ref.value_crc, len(held), ref.tag)

    def keys_after(self, after: bytes, limit: int) -> list[bytes]:
        """Up to ``limit`` keys greater than ``after``, ascending: a page of a listing that tolerates changes."""
        return sorted(key for key in self._by_key if key > after)[:limit]

    def tags(self) -> list[bytes]:
        """The packed placement tags of what is held: chunks of one tag always move together."""
        return list(self._by_tag)

    def names_of_tag(self, tag: bytes) -> Iterator[ChunkName]:
        return iter(self._by_tag.get(tag, ()))
