"""A satellite's memory: chunks under a byte budget, the least recently used value's first out.

The chunks of one key that are here, its *share*, are asked for together and worth nothing without each other: so they
grow old together too, and where room is needed the oldest share goes chunk by chunk, from its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from skymemory.protocol.messages import Presence
from skymemory.protocol.wire import CHUNK_REF_BYTES, TAG_BYTES, TAG_OFFSET, ChunkRef

ChunkName = tuple[bytes, int]
"""(key, 0-based index)."""
Chunk = tuple[bytes, bytes]
"""Packed reference and payload, as ``StoredChunk`` but plain: whole runs of them come and go."""
Share = dict[int, Chunk]

_VERSION = slice(48, 56)
"""Of a packed reference: length and CRC of the whole value, which tell two values of one key apart."""
_TAG = slice(TAG_OFFSET, TAG_OFFSET + TAG_BYTES)


class StoredChunk(NamedTuple):
    """``ref`` is the packed ``ChunkRef``, kept as bytes because it is sent as it came."""

    ref: bytes
    payload: bytes


@dataclass(slots=True)
class PutOutcome:
    """``replaced`` and ``evicted`` count chunks."""

    stored: bool
    replaced: int = 0
    evicted: int = 0


class ChunkStore:
    """Chunks of one satellite. ``used_bytes`` counts payloads and references and never exceeds ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._shares: OrderedDict[bytes, Share] = OrderedDict()
        self._count = 0

    @property
    def shares(self) -> MutableMapping[bytes, Share]:
        """Everything, by key: for ``native``, which may add chunks that ``added`` is then told of."""
        return self._shares

    def added(self, key: bytes, chunks: int, size_bytes: int) -> None:
        """The share of ``key`` has grown by so many chunks and bytes, which fit; it becomes the most recently used."""
        self._shares.move_to_end(key)
        self._count += chunks
        self.used_bytes += size_bytes

    def touch(self, key: bytes) -> None:
        """The key, which is here, becomes the most recently used one."""
        self._shares.move_to_end(key)

    def __len__(self) -> int:
        return self._count

    def items(self) -> Iterator[tuple[ChunkName, StoredChunk]]:
        """Everything, the next to be evicted first."""
        for key, share in self._shares.items():
            for index in sorted(share, reverse=True):
                yield (key, index), StoredChunk._make(share[index])

    def put(self, name: ChunkName, ref: bytes, payload: bytes) -> PutOutcome:
        """Store a chunk; its key becomes the most recently used one; the oldest are evicted as needed.

        Refused is a chunk that could not fit even alone (nothing is evicted for it), and one for which another chunk
        of the same value would have to go: the value does not fit, and half of it is worth nothing. Storing what is
        there already replaces it: every operation is idempotent.
        """
        key, index = name
        size = len(payload) + CHUNK_REF_BYTES
        outcome = PutOutcome(stored=size <= self.limit_bytes)
        if not outcome.stored:
            return outcome
        outcome.replaced = int(self.remove(name))
        if key in self._shares:
            self._shares.move_to_end(key)
        while self.used_bytes + size > self.limit_bytes:
            victim = self._victim(key, ref)
            if victim is None:
                outcome.stored = False
                return outcome
            self.remove(victim)
            outcome.evicted += 1
        self._shares.setdefault(key, {})[index] = (ref, payload)
        self.used_bytes += size
        self._count += 1
        return outcome

    def put_run(self, key: bytes, indices: list[int], chunks: list[Chunk], size_bytes: int) -> PutOutcome | None:
        """``put`` for ascending ``indices`` of one value at once; ``size_bytes`` is what they count in all.

        None where that needs a look at each chunk; nothing has been changed then.
        """
        share = self._shares.get(key, {})
        old = [share[index] for index in indices if index in share] if share else []
        outcome = PutOutcome(stored=True, replaced=len(old))
        if self.used_bytes + size_bytes > self.limit_bytes:
            if old or _size_bytes(share) + size_bytes > self.limit_bytes:
                return None
            if share:
                self._shares.move_to_end(key)
            while self.used_bytes + size_bytes > self.limit_bytes:
                oldest = next(iter(self._shares))
                self.remove((oldest, max(self._shares[oldest])))
                outcome.evicted += 1
        share.update(zip(indices, chunks, strict=True))
        self._shares[key] = share
        self._shares.move_to_end(key)
        self.used_bytes += size_bytes - sum(map(len, map(itemgetter(1), old))) - CHUNK_REF_BYTES * len(old)
        self._count += len(indices) - len(old)
        return outcome

    def _victim(self, key: bytes, ref: bytes) -> ChunkName | None:
        """What goes next to make room for a chunk of ``key``: never a chunk of the same value."""
        oldest, share = next(iter(self._shares.items()))
        if oldest != key:
            return oldest, max(share)
        other = [index for index, (its_ref, _) in share.items() if its_ref[_VERSION] != ref[_VERSION]]
        return (key, max(other)) if other else None

    def get_run(self, key: bytes, indices: Sequence[int]) -> tuple[Sequence[Chunk], list[int]]:
        """The chunks that are here, in the order of ``indices``, and the indices of those that are not.

        The key becomes the most recently used one.
        """
        share = self._shares.get(key)
        if share is None:
            return [], list(indices)
        self._shares.move_to_end(key)
        if len(indices) > 1:
            try:
                return itemgetter(*indices)(share), []
            except KeyError:
                pass
        missing = [index for index in indices if index not in share]
        return [share[index] for index in indices if index in share], missing

    def peek(self, name: ChunkName) -> StoredChunk | None:
        """The chunk, or None if it is not here; the order of eviction stays as it is."""
        share = self._shares.get(name[0])
        chunk = share.get(name[1]) if share is not None else None
        return None if chunk is None else StoredChunk._make(chunk)

    def remove(self, name: ChunkName) -> bool:
        key, index = name
        share = self._shares.get(key)
        chunk = share.pop(index, None) if share is not None else None
        if chunk is None:
            return False
        self.used_bytes -= len(chunk[1]) + CHUNK_REF_BYTES
        self._count -= 1
        if not share:
            del self._shares[key]
        return True

    def remove_key(self, key: bytes) -> int:
        """Remove every chunk of ``key``; how many there were."""
        share = self._shares.pop(key, {})
        self.used_bytes -= _size_bytes(share)
        self._count -= len(share)
        return len(share)

    def presence(self, key: bytes) -> Presence | None:
        """What is held of ``key``, told by its lowest chunk."""
        share = self._shares.get(key)
        if share is None:
            return None
        index = min(share)
        ref = ChunkRef.unpack(share[index][0])
        return Presence(index, ref.chunks, ref.length_bytes, ref.value_bytes, ref.value_crc, len(share), ref.tag)

    def keys_after(self, after: bytes, limit: int) -> list[bytes]:
        """Up to ``limit`` keys greater than ``after``, ascending: a page of a listing that tolerates changes."""
        return sorted(key for key in self._shares if key > after)[:limit]

    def names_by_tag(self) -> dict[bytes, list[ChunkName]]:
        """What is held, by packed placement tag: chunks of one tag always move together. Looks at every chunk."""
        groups: dict[bytes, list[ChunkName]] = {}
        for key, share in self._shares.items():
            for index, (ref, _) in share.items():
                groups.setdefault(ref[_TAG], []).append((key, index))
        return groups


def _size_bytes(share: Share) -> int:
    return sum(len(payload) for _, payload in share.values()) + CHUNK_REF_BYTES * len(share)
