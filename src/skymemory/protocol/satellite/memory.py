"""Chunk memory of a satellite: chunks by key under a byte budget, with pins, leases and expiries.

A *share* is a key's chunks here. They are worth nothing alone, so they age together and are evicted from the end. A
*pinned* or *leased* key is not evicted. Pins, leases and expiries end with the last chunk.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Literal, NamedTuple

from skymemory.eviction import LeastRecentlyUsed, Replacement
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.messages import KEY_BYTES, MOST_SINCE_S, WRITING_S, ChunkPresence, Dead
from skymemory.protocol.satellite.overload import MOST_AGE_S
from skymemory.protocol.wire import CHUNK_REF_BYTES, REPLICA_OFFSET, TAG_BYTES, TAG_OFFSET, ChunkRef

ChunkName = tuple[bytes, int]
Chunk = tuple[bytes, bytes]
Share = dict[int, Chunk]
Cause = Literal["replaced", "evicted", "deleted", "migrated_out", "lost"]
"""Reason of a removal: ``replaced`` by a chunk of the same name, ``evicted`` for room, age or policy, ``deleted`` by
command.
"""
CAUSES: tuple[Cause, ...] = ("replaced", "evicted", "deleted", "migrated_out", "lost")

_VERSION = slice(48, 56)
_TAG = slice(TAG_OFFSET, TAG_OFFSET + TAG_BYTES)
_SET_MOVES = slice(TAG_OFFSET + 8, TAG_OFFSET + 16)
_MOVES = struct.Struct(">ii")


class StoredChunk(NamedTuple):
    ref: bytes
    payload: bytes


@dataclass(slots=True)
class PutOutcome:
    stored: bool
    replaced: int = 0
    evicted: int = 0


class ChunkStore:
    """Chunks of a satellite. ``used_bytes`` counts payloads and references, at most ``limit_bytes``."""

    def __init__(
        self,
        limit_bytes: int,
        replacement: Replacement | None = None,
        pin_share: float = 1.0,
        record_evicted: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.shares: dict[bytes, Share] = {}
        """All chunks, by key. Call ``added`` if ``native`` added some."""
        self.pins: dict[bytes, float] = {}
        self.pinned_bytes = 0
        self.pin_limit_bytes = int(limit_bytes * pin_share)
        self.leases: dict[bytes, dict[int, float]] = {}
        self.leased_bytes = 0
        self.expiries: dict[bytes, float] = {}
        self.evicted: dict[bytes, bytes] | None = {} if record_evicted else None
        """Keys evicted in part and not stored since, with a packed reference; None: not recorded."""
        self.conflicts: list[tuple[ChunkName, bytes]] = []
        """Chunks replaced by another copy of themselves, with the replaced references."""
        self.ledger = Ledger()
        self._counters = counters if counters is not None else Counters()
        self._replacement: Replacement = replacement if replacement is not None else LeastRecentlyUsed()
        self._ordered = OrderedKeys()
        self._count = 0

    # --- Store ---

    def put(self, name: ChunkName, ref: bytes, payload: bytes, migrated: bool = False) -> PutOutcome:
        """Store a chunk; evict others as needed.

        It is refused, and nothing changes, if it and its value's other chunks for here do not fit beside pinned and
        leased keys: half a value is worth nothing. A stored chunk is replaced, so every operation is idempotent.
        """
        key, index = name
        size = len(payload) + CHUNK_REF_BYTES
        outcome = PutOutcome(stored=self._has_room(name, ref, size))
        if not outcome.stored:
            return outcome
        self.conflicts += conflicts_of(key, self.shares.get(key, {}), [(index, ref)])
        outcome.replaced = int(self._remove_chunk(name, "replaced"))
        while self.used_bytes + size > self.limit_bytes:
            self._evict(self._get_victim(key, ref))
            outcome.evicted += 1
        self.shares.setdefault(key, {})[index] = (ref, payload)
        self._record_stored(key, size)
        self.ledger.record_added(size, migrated)
        self._count += 1
        self._update_rank(key, migrated)
        return outcome

    def put_run(
        self, key: bytes, indices: list[int], chunks: list[Chunk], size_bytes: int, migrated: bool = False
    ) -> PutOutcome | None:
        """Store chunks of a value with ascending ``indices``, of ``size_bytes`` in memory.

        Return None, and change nothing, if each must be put individually.
        """
        # Everything fits, or other keys can be evicted for all of it: the common cases. Otherwise: chunk by chunk.
        share = self.shares.get(key, {})
        old = [share[index] for index in indices if index in share] if share else []
        outcome = PutOutcome(stored=True, replaced=len(old))
        if self.used_bytes + size_bytes > self.limit_bytes:
            if old or size_bytes_of(share) + self._get_kept_bytes_of_others(key) + size_bytes > self.limit_bytes:
                return None
            if not self._has_room((key, indices[0]), chunks[0][0], len(chunks[0][1]) + CHUNK_REF_BYTES):
                return None
            while self.used_bytes + size_bytes > self.limit_bytes:
                self._evict(self._get_victim(key, chunks[0][0]))
                outcome.evicted += 1
        if old:
            self.conflicts += conflicts_of(key, share, zip(indices, map(itemgetter(0), chunks), strict=True))
        share.update(zip(indices, chunks, strict=True))
        self.shares[key] = share  # it may be new, or have been removed when its last chunk was evicted
        self._update_rank(key, migrated)
        replaced_bytes = sum(map(len, map(itemgetter(1), old))) + CHUNK_REF_BYTES * len(old)
        self._record_stored(key, size_bytes - replaced_bytes)
        self.ledger.record_added(size_bytes, migrated)
        self.ledger.record_removed(replaced_bytes, "replaced")
        self._count += len(indices) - len(old)
        return outcome

    def added(self, key: bytes, chunks: int, size_bytes: int, replaced_bytes: int = 0) -> None:
        """Account for SETs that ``native`` stored."""
        self._update_rank(key)
        self._count += chunks
        self._record_stored(key, size_bytes)
        self.ledger.record_added(size_bytes + replaced_bytes, migrated=False)
        self.ledger.record_removed(replaced_bytes, "replaced")

    def count_outdated(self, payload_bytes: int) -> None:
        self.ledger.record_added(payload_bytes + CHUNK_REF_BYTES, migrated=True)
        self.ledger.record_removed(payload_bytes + CHUNK_REF_BYTES, "replaced")

    def relabel(self, name: ChunkName, ref: bytes) -> None:
        self.shares[name[0]][name[1]] = (ref, self.shares[name[0]][name[1]][1])

    def _has_room(self, name: ChunkName, packed: bytes, size_bytes: int) -> bool:
        """Return True if a chunk fits after all permitted evictions; if any is needed, with its value's other
        chunks.
        """
        key, index = name
        share = self.shares.get(key, {})
        replaced_bytes = len(share[index][1]) + CHUNK_REF_BYTES if index in share else 0
        if self.used_bytes - replaced_bytes + size_bytes <= self.limit_bytes:
            return True
        ref = ChunkRef.unpack(packed)
        siblings = {
            at: len(payload) + CHUNK_REF_BYTES
            for at, (other_ref, payload) in share.items()
            if at != index and other_ref[_VERSION] == packed[_VERSION]
        }
        return (
            self._get_kept_bytes_of_others(key)
            + sum(siblings.values())
            + size_bytes
            + _get_missing_bytes(ref, siblings)
            <= self.limit_bytes
        )

    def _get_victim(self, key: bytes, ref: bytes) -> ChunkName:
        """Return the next chunk to evict, never of the same value. ``_has_room`` ensures that it exists."""
        victim = self._replacement.victim(key)
        if victim is not None:
            return victim, max(self.shares[victim])
        share = self.shares[key]
        return key, max(index for index, (stored_ref, _) in share.items() if stored_ref[_VERSION] != ref[_VERSION])

    def _evict(self, victim: ChunkName) -> None:
        key, index = victim
        ref = self.shares[key][index][0]
        self.remove(victim, "evicted")
        if self.evicted is not None:
            self.evicted[key] = ref

    # --- Read ---

    def get_run(self, key: bytes, indices: Sequence[int]) -> tuple[Sequence[Chunk], list[int]]:
        """Return stored chunks, in the order of ``indices``, and missing indices."""
        share = self.shares.get(key)
        if share is None:
            return [], list(indices)
        self.touch(key)
        if len(indices) > 1:
            try:
                return itemgetter(*indices)(share), []
            except KeyError:
                pass
        missing = [index for index in indices if index not in share]
        return [share[index] for index in indices if index in share], missing

    def touch(self, key: bytes) -> None:
        if key not in self.pins:
            self._replacement.on_use(key)

    def refresh(self, key: bytes) -> bool:
        if key in self.shares:
            self._update_rank(key)
        return key in self.shares

    def peek(self, name: ChunkName) -> StoredChunk | None:
        share = self.shares.get(name[0])
        chunk = share.get(name[1]) if share is not None else None
        return None if chunk is None else StoredChunk._make(chunk)

    def presence(self, key: bytes) -> ChunkPresence | None:
        share = self.shares.get(key)
        if share is None:
            return None
        index = latest_index(share)
        ref = ChunkRef.unpack(share[index][0])
        return ChunkPresence(index, ref.chunks, ref.length_bytes, ref.value_bytes, ref.value_crc, len(share), ref.tag)

    # --- Remove ---

    def remove(self, name: ChunkName, cause: Cause = "deleted") -> bool:
        removed = self._remove_chunk(name, cause)
        if removed:
            self._drop_empty_share(name[0], cause == "evicted")
        return removed

    def remove_key(self, key: bytes, cause: Cause = "deleted") -> int:
        share = self.shares.get(key, {})
        size, chunks = size_bytes_of(share), len(share)
        self._add_bytes(key, -size)
        self.ledger.record_removed(size, cause)
        self._count -= chunks
        share.clear()
        self._drop_empty_share(key)
        return chunks

    def remove_values(self, dead: Iterable[Dead], cause: Cause = "evicted") -> int:
        dropped = 0
        for key, setting in dead:
            indices = [index for index, (ref, _) in self.shares.get(key, {}).items() if setting_of(ref) == setting]
            dropped += sum(self.remove((key, index), cause) for index in indices)
        return dropped

    def _remove_chunk(self, name: ChunkName, cause: Cause) -> bool:
        """Remove a chunk; its share stays, even if empty."""
        key, index = name
        share = self.shares.get(key)
        chunk = share.pop(index, None) if share is not None else None
        if chunk is None:
            return False
        size = len(chunk[1]) + CHUNK_REF_BYTES
        self._add_bytes(key, -size)
        self.ledger.record_removed(size, cause)
        self._count -= 1
        return True

    def _drop_empty_share(self, key: bytes, evicted: bool = False) -> None:
        if key in self.shares and not self.shares[key]:
            del self.shares[key]
            self._ordered.remove(key)
            self.pins.pop(key, None)
            self.leases.pop(key, None)
            self.expiries.pop(key, None)
            self._replacement.on_removal(key, evicted)

    # --- List ---

    def __len__(self) -> int:
        return self._count

    def order(self) -> list[bytes]:
        return [*self._replacement.order(), *sorted(self.pins)]

    def items(self) -> Iterator[tuple[ChunkName, StoredChunk]]:
        for key in self.order():
            share = self.shares[key]
            for index in sorted(share, reverse=True):
                yield (key, index), StoredChunk._make(share[index])

    def keys_after(self, after: bytes, limit: int) -> list[bytes]:
        return self._ordered.after(after, limit)

    # --- Pins and leases ---

    def pin(self, key: bytes, until_s: float = math.inf) -> None:
        """Protect a stored key from eviction; ``Retention`` ends that at ``until_s``."""
        if key not in self.pins:
            self.pinned_bytes += self.share_bytes(key)
            self._replacement.on_removal(key)
        self.pins[key] = until_s

    def unpin(self, key: bytes) -> None:
        if key in self.pins:
            del self.pins[key]
            self.pinned_bytes -= self.share_bytes(key)
            self._replacement.on_store_or_touch(key)

    def lease(self, key: bytes, ground: int, until_s: float) -> None:
        """Protect a stored, unpinned key until all its leases end; reads still change its rank."""
        if key not in self.leases:
            self.leases[key] = {}
            self.leased_bytes += self.share_bytes(key)
            self._replacement.hold(key)
        self.leases[key][ground] = until_s

    def release(self, key: bytes, ground: int) -> None:
        holders = self.leases.get(key)
        if holders is not None and holders.pop(ground, None) is not None and not holders:
            self.end_lease(key)

    def end_lease(self, key: bytes) -> None:
        if self.leases.pop(key, None) is not None:
            self.leased_bytes -= self.share_bytes(key)
            self._replacement.free(key)

    def _get_kept_bytes_of_others(self, key: bytes) -> int:
        own_bytes = self.share_bytes(key) if key in self.pins or key in self.leases else 0
        return self.pinned_bytes + self.leased_bytes - own_bytes

    def share_bytes(self, key: bytes) -> int:
        return size_bytes_of(self.shares.get(key, {}))

    # --- Accounts ---

    def _add_bytes(self, key: bytes, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        if key in self.pins:
            self.pinned_bytes += size_bytes
        if key in self.leases:
            self.leased_bytes += size_bytes

    def _record_stored(self, key: bytes, size_bytes: int) -> None:
        """Account for added bytes. A key whose growth exceeds the limit of pins loses its pin."""
        self._add_bytes(key, size_bytes)
        if len(self.shares) > len(self._ordered):  # otherwise no key is new: that needs no search
            self._ordered.add(key)
        if key in self.pins and self.pinned_bytes > self.pin_limit_bytes:
            self.unpin(key)
            self._counters.add("pins_refused")

    def _update_rank(self, key: bytes, migrated: bool = False) -> None:
        if self.evicted:
            self.evicted.pop(key, None)
        if key not in self.pins:
            (self._replacement.on_handover if migrated else self._replacement.on_store_or_touch)(key)


def _get_missing_bytes(ref: ChunkRef, stored_indices: Collection[int]) -> int:
    """Return the memory for chunks of the same server and value as ``ref`` that are yet to be stored."""
    servers, last = max(1, ref.tag.servers), ref.chunks - 1
    part = range(ref.index % servers, ref.chunks, servers)
    missing = len(part) - sum(at in part for at in stored_indices) - 1
    if missing <= 0:
        return 0
    full_bytes = ref.length_bytes if ref.index < last else max(0, ref.value_bytes - ref.length_bytes) // last
    short_bytes = 0
    if last in part and last != ref.index and last not in stored_indices:
        short_bytes = min(max(0, full_bytes * ref.chunks - ref.value_bytes), full_bytes)
    return missing * (full_bytes + CHUNK_REF_BYTES) - short_bytes


# --- Functions on shares and packed references ---


def setting_of(ref: bytes) -> bytes:
    """Return the CRC of the value and its moves when it was SET, which identify a write of the key."""
    return ref[52:56] + ref[64:72]


def set_moves_of(ref: bytes) -> Moves:
    slot_moves, plane_moves = _MOVES.unpack_from(ref, TAG_OFFSET + 8)
    return slot_moves, plane_moves


def latest_index(share: Share) -> int:
    """Return the lowest index of the latest placement; earlier placements leave chunks behind."""
    settings = {ref[_SET_MOVES] for ref, _ in share.values()}
    if len(settings) == 1:
        return min(share)
    latest = max(sum(_MOVES.unpack(moves)) for moves in settings)
    return min(index for index, (ref, _) in share.items() if sum(_MOVES.unpack(ref[_SET_MOVES])) == latest)


def latest_ref(share: Share) -> bytes:
    return share[latest_index(share)][0]


def size_bytes_of(share: Share) -> int:
    return sum(len(payload) for _, payload in share.values()) + CHUNK_REF_BYTES * len(share)


def as_copy(ref: bytes, replica: int) -> bytes:
    return ref[:REPLICA_OFFSET] + bytes([replica]) + ref[REPLICA_OFFSET + 1 :]


def conflicts_of(key: bytes, share: Share, coming: Iterable[tuple[int, bytes]]) -> list[tuple[ChunkName, bytes]]:
    """Return stored chunks of which ``coming`` are other copies, with their references."""
    conflicts = []
    for index, ref in coming:
        stored = share.get(index)
        if stored is not None and stored[0] != ref and stored[0] == as_copy(ref, stored[0][REPLICA_OFFSET]):
            conflicts.append(((key, index), stored[0]))
    return conflicts


def names_by_tag(shares: Mapping[bytes, Share]) -> dict[bytes, list[ChunkName]]:
    """Group all chunks by packed placement tag."""
    groups: dict[bytes, list[ChunkName]] = {}
    for key, share in shares.items():
        tags = {ref[_TAG] for ref, _ in share.values()}
        if len(tags) == 1:  # nearly always: a satellite holds one server's part of a value
            groups.setdefault(tags.pop(), []).extend(zip(repeat(key), share))
        else:
            for index, (ref, _) in share.items():
                groups.setdefault(ref[_TAG], []).append((key, index))
    return groups


_DELETED_S = 1.0
_REMEMBERED_DELETIONS = 1 << 14
_REMEMBERED_SETS = 1 << 16
_REMEMBERED_DEAD = 4096


class KeyHistory:
    """Recent writes and deletions, which reveal late handovers and notices."""

    def __init__(self) -> None:
        self._banned_until: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        """End of each key's ban from takeover, and its setting (empty: all)."""
        self._written_s: OrderedDict[bytes, float] = OrderedDict()
        self._complete_since_s = -math.inf
        self.dead: OrderedDict[bytes, bytes] = OrderedDict()
        """Settings last dropped as dead, of which copies are refused."""

    def deleted(self, deleted: Iterable[Dead], now_s: float) -> None:
        """Refuse handed-over chunks of deleted keys or settings for a second: senders may not know of the deletion."""
        while self._banned_until and next(iter(self._banned_until.values()))[0] <= now_s - MOST_AGE_S:
            self._banned_until.popitem(last=False)
        for key, setting in deleted:
            if not setting:
                self._written_s.pop(key, None)
            self._banned_until.pop(key, None)
            self._banned_until[key] = now_s + _DELETED_S, setting
        while len(self._banned_until) > _REMEMBERED_DELETIONS:
            self._banned_until.popitem(last=False)

    def dropped(self, dead: Iterable[Dead]) -> None:
        self.dead.update(dead)
        while len(self.dead) > _REMEMBERED_DEAD:
            self.dead.popitem(last=False)

    def written(self, key: bytes, now_s: float) -> None:
        if self._banned_until:
            self._banned_until.pop(key, None)
        if self.dead:
            self.dead.pop(key, None)
        self.still_written(key, now_s)

    def still_written(self, key: bytes, now_s: float) -> None:
        """Record that a writer still stores the key, on any satellite."""
        self._written_s[key] = now_s
        self._written_s.move_to_end(key)
        while len(self._written_s) > _REMEMBERED_SETS or next(iter(self._written_s.values())) < now_s - MOST_SINCE_S:
            self._complete_since_s = self._written_s.popitem(last=False)[1]

    def was_written_since(self, key: bytes, since_s: float) -> bool:
        return since_s <= self._complete_since_s or self._written_s.get(key, -math.inf) >= since_s

    def is_being_written(self, key: bytes, now_s: float) -> bool:
        return self.was_written_since(key, now_s - WRITING_S)

    def is_deleted(self, ref: bytes, came_s: float) -> bool:
        """Return True if a handed-over chunk's key or setting was just deleted: it must be dropped."""
        until_s, setting = self._banned_until.get(ref[:KEY_BYTES], (came_s, b""))
        return until_s > came_s and setting in (b"", setting_of(ref))


_MAX_BLOCK_KEYS = 512


class OrderedKeys:
    """Sorted set of keys: O(log keys) to add and remove, O(log keys + limit) for a page."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = []
        self._last_keys: list[bytes] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes) -> None:
        if not self._blocks:
            self._blocks, self._last_keys, self._count = [[key]], [key], 1
            return
        at = min(bisect_left(self._last_keys, key), len(self._blocks) - 1)
        block = self._blocks[at]
        place = bisect_left(block, key)
        if place < len(block) and block[place] == key:
            return
        self._count += 1
        block.insert(place, key)
        if len(block) > _MAX_BLOCK_KEYS:
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._last_keys[at : at + 1] = [block[half - 1], block[-1]]
        else:
            self._last_keys[at] = block[-1]

    def remove(self, key: bytes) -> None:
        at = bisect_left(self._last_keys, key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        self._count -= 1
        if block:
            self._last_keys[at] = block[-1]
        else:
            del self._blocks[at], self._last_keys[at]

    def after(self, key: bytes, limit: int) -> list[bytes]:
        at = bisect_right(self._last_keys, key)
        page: list[bytes] = []
        while at < len(self._blocks) and len(page) < limit:
            block = self._blocks[at]
            first = 0 if page else bisect_right(block, key)
            page += block[first : first + limit - len(page)]
            at += 1
        return page


class Ledger:
    """Account of a satellite's bytes (payloads and references), as monotonic counters. At any moment

        set + migrated in = held + replaced + evicted + deleted + migrated out + lost.

    Storing a chunk again adds to set (or migrated in) and to replaced. A handed-over chunk counts at both ends until
    the old copy is deleted. Lost is what a satellite held when it died and came back.
    """

    def __init__(self) -> None:
        self._bytes = dict.fromkeys(("set", "migrated_in", *CAUSES), 0)

    def record_added(self, size_bytes: int, migrated: bool) -> None:
        self._bytes["migrated_in" if migrated else "set"] += size_bytes

    def record_removed(self, size_bytes: int, cause: Cause) -> None:
        self._bytes[cause] += size_bytes

    def figures(self) -> dict[str, int]:
        return {f"bytes_{name}": size_bytes for name, size_bytes in self._bytes.items()}
