"""A satellite's memory: chunks under a byte budget; a policy (``replacement``) says whose are the first out.

The chunks of one key that are here, its *share*, are asked for together and worth nothing without each other: so they
grow old together too, and where room is needed the oldest share goes chunk by chunk, from its end. A *shielded* key
(``retention`` pins it) is not evicted at all.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar

from skymemory.eviction.policies import LeastRecentlyUsed, Replacement
from skymemory.protocol.messages import Presence
from skymemory.protocol.wire import CHUNK_REF_BYTES, REPLICA_OFFSET, TAG_BYTES, TAG_OFFSET, ChunkRef

_VERSION = slice(48, 56)
"""Of a packed reference: length and CRC of the whole value, which tell two values of one key apart."""
_TAG = slice(TAG_OFFSET, TAG_OFFSET + TAG_BYTES)


@dataclass(slots=True)
class PutOutcome:
    """``replaced`` and ``evicted`` count chunks."""

    stored: bool
    replaced: int = 0
    evicted: int = 0


class ChunkStore:
    """Chunks of one satellite. ``used_bytes`` counts payloads and references and never exceeds ``limit_bytes``."""

    def __init__(self, limit_bytes: int, replacement: Replacement | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.shielded_bytes = 0
        """Of these, what shielded keys have."""
        self.shield_limit_bytes = limit_bytes
        """A shielded key that grows beyond what all of them may have is shielded no longer."""
        self.unshielded: Callable[[bytes], None] | None = None
        """Told of each key that lost its shield by growing."""
        self.held_bytes = 0
        """What held keys have; none is shielded."""
        self.ledger = Ledger()
        self.evicted: dict[bytes, bytes] | None = None
        """Where somebody set a dictionary: keys that lost chunks to eviction and were not stored since, with the packed
        reference of one.
        """
        self.gone: Callable[[bytes], None] | None = None
        """Told of each key whose last chunk went, for whatever cause."""
        self.met: list[tuple[ChunkName, bytes]] = []
        """Chunks whose place another copy of them has taken, with their packed references, till somebody takes them."""
        self._shares: dict[bytes, Share] = {}
        self._replacement: Replacement = replacement if replacement is not None else LeastRecentlyUsed()
        self._shielded: set[bytes] = set()
        self._held: set[bytes] = set()
        self._ordered = OrderedKeys()
        self._count = 0

    @property
    def shares(self) -> MutableMapping[bytes, Share]:
        """Everything, by key: for ``native``, which may add chunks that ``added`` is then told of."""
        return self._shares

    def added(self, key: bytes, chunks: int, size_bytes: int, replaced_bytes: int = 0) -> None:
        """SETs have made the share of ``key`` grow by so many chunks and bytes, which fit, after so many were replaced;
        it becomes the most recently used.
        """
        self._note(key)
        self._count += chunks
        self._came(key, size_bytes)
        self.ledger.came(size_bytes + replaced_bytes, migrated=False)
        self.ledger.went(replaced_bytes, "replaced")

    def touch(self, key: bytes) -> None:
        """The key, which is here, was asked for."""
        if key not in self._shielded:
            self._replacement.used(key)

    def refresh(self, key: bytes) -> bool:
        """The key matters now, though nobody asked for its chunks; whether it is here."""
        if key in self._shares:
            self._note(key)
        return key in self._shares

    def shield(self, key: bytes) -> None:
        """The key, which is here, is not evicted from now on."""
        if key not in self._shielded:
            self._shielded.add(key)
            self.shielded_bytes += self.share_bytes(key)
        self._replacement.gone(key)

    def unshield(self, key: bytes) -> None:
        """The key may be evicted again, as if it had come just now."""
        if key in self._shielded:
            self._shielded.discard(key)
            self.shielded_bytes -= self.share_bytes(key)
            self._replacement.noted(key)

    def is_shielded(self, key: bytes) -> bool:
        return key in self._shielded

    def hold(self, key: bytes) -> None:
        """The key, which is here and not shielded, is not evicted until it is freed; uses of it count as ever."""
        if key not in self._held:
            self._held.add(key)
            self.held_bytes += self.share_bytes(key)
            self._replacement.hold(key)

    def free(self, key: bytes) -> None:
        """The key may be evicted again, by the rank that it has now."""
        if key in self._held:
            self._held.discard(key)
            self.held_bytes -= self.share_bytes(key)
            self._replacement.free(key)

    def _kept_beside(self, key: bytes) -> int:
        """What other keys have that is not evicted, in bytes."""
        own_bytes = self.share_bytes(key) if key in self._shielded or key in self._held else 0
        return self.shielded_bytes + self.held_bytes - own_bytes

    def share_bytes(self, key: bytes) -> int:
        """What the chunks of ``key`` that are here count in memory."""
        return size_bytes_of(self._shares.get(key, {}))

    def _grow(self, key: bytes, size_bytes: int) -> None:
        """The share of ``key`` has grown by so much, or (negative) shrunk."""
        self.used_bytes += size_bytes
        if key in self._shielded:
            self.shielded_bytes += size_bytes
        if key in self._held:
            self.held_bytes += size_bytes

    def _came(self, key: bytes, size_bytes: int) -> None:
        """``_grow`` by chunks that came."""
        self._grow(key, size_bytes)
        if len(self._shares) > len(self._ordered):  # else no key is new: that costs no search
            self._ordered.add(key)
        if key in self._shielded and self.shielded_bytes > self.shield_limit_bytes:
            self.unshield(key)
            if self.unshielded is not None:
                self.unshielded(key)

    def _note(self, key: bytes, migrated: bool = False) -> None:
        if self.evicted:
            self.evicted.pop(key, None)
        if key not in self._shielded:
            (self._replacement.arrived if migrated else self._replacement.noted)(key)

    def __len__(self) -> int:
        return self._count

    def order(self) -> list[bytes]:
        """All keys, the next to be evicted first."""
        return [*self._replacement.order(), *sorted(self._shielded)]

    def items(self) -> Iterator[tuple[ChunkName, StoredChunk]]:
        """Everything, the next to be evicted first."""
        for key in self.order():
            share = self._shares[key]
            for index in sorted(share, reverse=True):
                yield (key, index), StoredChunk._make(share[index])

    def put(self, name: ChunkName, ref: bytes, payload: bytes, migrated: bool = False) -> PutOutcome:
        """Store a chunk; its key becomes the most recently used one; others are evicted as needed.

        Refused, with nothing changed, is a chunk for which more would have to go than may: this one and the chunks of
        its value that are to stand beside it do not fit beside what is shielded. The value cannot be stored here, and
        half of it is worth nothing. Storing what is there already replaces it: every operation is idempotent.
        ``migrated`` is for the ledger.
        """
        key, index = name
        size = len(payload) + CHUNK_REF_BYTES
        outcome = PutOutcome(stored=self._has_room(name, ref, size))
        if not outcome.stored:
            return outcome
        self.met += others_met(key, self._shares.get(key, {}), [(index, ref)])
        outcome.replaced = int(self._take(name, "replaced"))
        while self.used_bytes + size > self.limit_bytes:
            self._evict(self._victim(key, ref))
            outcome.evicted += 1
        self._shares.setdefault(key, {})[index] = (ref, payload)
        self._came(key, size)
        self.ledger.came(size, migrated)
        self._count += 1
        self._note(key, migrated)
        return outcome

    def put_run(
        self, key: bytes, indices: list[int], chunks: list[Chunk], size_bytes: int, migrated: bool = False
    ) -> PutOutcome | None:
        """``put`` for ascending ``indices`` of one value at once; ``size_bytes`` is what they count in all.

        None where that needs a look at each chunk; nothing has been changed then.
        """
        share = self._shares.get(key, {})
        old = [share[index] for index in indices if index in share] if share else []
        outcome = PutOutcome(stored=True, replaced=len(old))
        if self.used_bytes + size_bytes > self.limit_bytes:
            if old or size_bytes_of(share) + self._kept_beside(key) + size_bytes > self.limit_bytes:
                return None
            if not self._has_room((key, indices[0]), chunks[0][0], len(chunks[0][1]) + CHUNK_REF_BYTES):
                return None
            while self.used_bytes + size_bytes > self.limit_bytes:
                self._evict(self._victim(key, chunks[0][0]))
                outcome.evicted += 1
        if old:
            self.met += others_met(key, share, zip(indices, map(itemgetter(0), chunks), strict=True))
        share.update(zip(indices, chunks, strict=True))
        self._shares[key] = share
        self._note(key, migrated)
        replaced_bytes = sum(map(len, map(itemgetter(1), old))) + CHUNK_REF_BYTES * len(old)
        self._came(key, size_bytes - replaced_bytes)
        self.ledger.came(size_bytes, migrated)
        self.ledger.went(replaced_bytes, "replaced")
        self._count += len(indices) - len(old)
        return outcome

    def pass_over(self, payload_bytes: int) -> None:
        """A chunk of this size was handed over that is older than what is here: in the books it came and went."""
        self.ledger.came(payload_bytes + CHUNK_REF_BYTES, migrated=True)
        self.ledger.went(payload_bytes + CHUNK_REF_BYTES, "replaced")

    def _has_room(self, name: ChunkName, packed: bytes, size_bytes: int) -> bool:
        """Whether a chunk that counts so much fits, once all that may go for it has gone.

        Where something would have to go, its whole part of the value must fit: the chunks of it that are here, and
        those that its server is yet to get.
        """
        key, index = name
        share = self._shares.get(key, {})
        replaced_bytes = len(share[index][1]) + CHUNK_REF_BYTES if index in share else 0
        if self.used_bytes - replaced_bytes + size_bytes <= self.limit_bytes:
            return True
        ref = ChunkRef.unpack(packed)
        same = {
            at: len(payload) + CHUNK_REF_BYTES
            for at, (its_ref, payload) in share.items()
            if at != index and its_ref[_VERSION] == packed[_VERSION]
        }
        return self._kept_beside(key) + sum(same.values()) + size_bytes + _coming_bytes(ref, same) <= self.limit_bytes

    def _victim(self, key: bytes, ref: bytes) -> ChunkName:
        """What goes next to make room for a chunk of ``key``: never a chunk of the same value. There is one, as
        ``_has_room`` found.
        """
        victim = self._replacement.victim(key)
        if victim is not None:
            return victim, max(self._shares[victim])
        share = self._shares[key]
        return key, max(index for index, (its_ref, _) in share.items() if its_ref[_VERSION] != ref[_VERSION])

    def _evict(self, victim: ChunkName) -> None:
        key, index = victim
        ref = self._shares[key][index][0]
        self.remove(victim, "evicted")
        if self.evicted is not None:
            self.evicted[key] = ref

    def get_run(self, key: bytes, indices: Sequence[int]) -> tuple[Sequence[Chunk], list[int]]:
        """The chunks that are here, in the order of ``indices``, and the indices of those that are not.

        The key becomes the most recently used one.
        """
        share = self._shares.get(key)
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

    def relabel(self, name: ChunkName, ref: bytes) -> None:
        """The chunk, which is here, is another copy of the same from now on."""
        self._shares[name[0]][name[1]] = (ref, self._shares[name[0]][name[1]][1])

    def peek(self, name: ChunkName) -> StoredChunk | None:
        """The chunk, or None if it is not here; the order of eviction stays as it is."""
        share = self._shares.get(name[0])
        chunk = share.get(name[1]) if share is not None else None
        return None if chunk is None else StoredChunk._make(chunk)

    def remove(self, name: ChunkName, cause: Cause = "deleted") -> bool:
        """Whether it was here; the ledger has its bytes under ``cause``."""
        taken = self._take(name, cause)
        if taken:
            self._tidy(name[0], cause == "evicted")
        return taken

    def _take(self, name: ChunkName, cause: Cause) -> bool:
        """The chunk goes; its share stays, even empty."""
        key, index = name
        share = self._shares.get(key)
        chunk = share.pop(index, None) if share is not None else None
        if chunk is None:
            return False
        size = len(chunk[1]) + CHUNK_REF_BYTES
        self._grow(key, -size)
        self.ledger.went(size, cause)
        self._count -= 1
        return True

    def _tidy(self, key: bytes, evicted: bool = False) -> None:
        """An empty share is none."""
        if key in self._shares and not self._shares[key]:
            del self._shares[key]
            self._ordered.remove(key)
            self._shielded.discard(key)
            self._held.discard(key)
            self._replacement.gone(key, evicted)
            if self.gone is not None:
                self.gone(key)

    def remove_key(self, key: bytes, cause: Cause = "deleted") -> int:
        """Remove every chunk of ``key``; how many there were."""
        share = self._shares.get(key, {})
        size, chunks = size_bytes_of(share), len(share)
        self._grow(key, -size)
        self.ledger.went(size, cause)
        self._count -= chunks
        share.clear()
        self._tidy(key)
        return chunks

    def presence(self, key: bytes) -> Presence | None:
        """What is held of ``key``, told by the lowest chunk of its latest placement."""
        share = self._shares.get(key)
        if share is None:
            return None
        index = told_by(share)
        ref = ChunkRef.unpack(share[index][0])
        return Presence(index, ref.chunks, ref.length_bytes, ref.value_bytes, ref.value_crc, len(share), ref.tag)

    def keys_after(self, after: bytes, limit: int) -> list[bytes]:
        """Up to ``limit`` keys greater than ``after``, ascending: a page of a listing that tolerates changes."""
        return self._ordered.after(after, limit)


def _coming_bytes(ref: ChunkRef, here: Collection[int]) -> int:
    """What the chunks of a server's part count that are neither ``ref``'s own nor ``here``."""
    servers, last = max(1, ref.tag.servers), ref.chunks - 1
    part = range(ref.index % servers, ref.chunks, servers)
    missing = len(part) - sum(at in part for at in here) - 1
    if missing <= 0:
        return 0
    full_bytes = ref.length_bytes if ref.index < last else max(0, ref.value_bytes - ref.length_bytes) // last
    short_bytes = 0
    if last in part and last != ref.index and last not in here:
        short_bytes = min(max(0, full_bytes * ref.chunks - ref.value_bytes), full_bytes)
    return missing * (full_bytes + CHUNK_REF_BYTES) - short_bytes


# What one satellite holds of one key, its *share*: chunks by index, with references that say which copy each is.


ChunkName = tuple[bytes, int]
"""(key, 0-based index)."""
Chunk = tuple[bytes, bytes]
"""Packed reference and payload, as ``StoredChunk`` but plain: whole runs of them come and go."""
Share = dict[int, Chunk]

_SET_MOVES = slice(TAG_OFFSET + 8, TAG_OFFSET + 16)
_MOVES = struct.Struct(">ii")


class StoredChunk(NamedTuple):
    """``ref`` is the packed ``ChunkRef``, kept as bytes because it is sent as it came."""

    ref: bytes
    payload: bytes


def told_by(share: Share) -> int:
    """The lowest chunk of the latest placement. A value that was set again after moves of the box, or prefetched,
    leaves chunks of the earlier placement on the satellites that both have.
    """
    settings = {ref[_SET_MOVES] for ref, _ in share.values()}
    if len(settings) == 1:
        return min(share)
    latest = max(settings, key=lambda moves: sum(_MOVES.unpack(moves)))
    return min(index for index, (ref, _) in share.items() if ref[_SET_MOVES] == latest)


def size_bytes_of(share: Share) -> int:
    """What it counts in memory: payloads and references."""
    return sum(len(payload) for _, payload in share.values()) + CHUNK_REF_BYTES * len(share)


def as_copy(ref: bytes, replica: int) -> bytes:
    """The packed reference of the same chunk as another copy of it."""
    return ref[:REPLICA_OFFSET] + bytes([replica]) + ref[REPLICA_OFFSET + 1 :]


def others_met(key: bytes, share: Share, coming: Iterable[tuple[int, bytes]]) -> list[tuple[ChunkName, bytes]]:
    """Which chunks of a share those that are coming (index and packed reference) are other copies of, with the
    references of those that are here. Chunks of other values, or of other settings, are no copies.
    """
    met = []
    for index, ref in coming:
        here = share.get(index)
        if here is not None and here[0] != ref and here[0] == as_copy(ref, here[0][REPLICA_OFFSET]):
            met.append(((key, index), here[0]))
    return met


def names_by_tag(shares: Mapping[bytes, Share]) -> dict[bytes, list[ChunkName]]:
    """What is held, by packed placement tag: chunks of one tag always move together. Looks at every chunk."""
    groups: dict[bytes, list[ChunkName]] = {}
    for key, share in shares.items():
        tags = {ref[_TAG] for ref, _ in share.values()}
        if len(tags) == 1:  # nearly always: what a satellite has of one value is one server's part
            groups.setdefault(tags.pop(), []).extend(zip(repeat(key), share))
        else:
            for index, (ref, _) in share.items():
                groups.setdefault(ref[_TAG], []).append((key, index))
    return groups


# Keys in ascending order while they come and go, so that a page of a listing costs what it holds, not all there is.


_MOST = 512
"""Keys in one block: inserting moves half of so many pointers, which costs less than the search for the place."""


class OrderedKeys:
    """A set of keys in blocks of at most ``_MOST``. O(log keys) to add and remove, O(log keys + limit) for a page."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = []
        self._lasts: list[bytes] = []
        """The greatest key of each block."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes) -> None:
        """The key comes; nothing changes if it is here already."""
        if not self._blocks:
            self._blocks, self._lasts, self._count = [[key]], [key], 1
            return
        at = min(bisect_left(self._lasts, key), len(self._blocks) - 1)
        block = self._blocks[at]
        place = bisect_left(block, key)
        if place < len(block) and block[place] == key:
            return
        self._count += 1
        block.insert(place, key)
        if len(block) > _MOST:
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._lasts[at : at + 1] = [block[half - 1], block[-1]]
        else:
            self._lasts[at] = block[-1]

    def remove(self, key: bytes) -> None:
        """The key, which is here, goes."""
        at = bisect_left(self._lasts, key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        self._count -= 1
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at], self._lasts[at]

    def after(self, key: bytes, limit: int) -> list[bytes]:
        """Up to ``limit`` keys greater than ``key``, ascending."""
        at = bisect_right(self._lasts, key)
        page: list[bytes] = []
        while at < len(self._blocks) and len(page) < limit:
            block = self._blocks[at]
            first = 0 if page else bisect_right(block, key)
            page += block[first : first + limit - len(page)]
            at += 1
        return page


# A satellite's books in bytes: what came in is held, or went, and for every byte that went there is a cause.
#
# A chunk counts as ``ChunkStore.used_bytes`` counts it: its payload and its 72 bytes of reference. For every
# satellite,
# at any moment,
#
#     set + migrated in = held + replaced + evicted + deleted + migrated out + lost.
#
# Both sides are gross: storing again what is here already counts once as set (or migrated in) and once as replaced. A
# copy that a handover has made counts at both ends until the old one is deleted, a grace period after its
# acknowledgement; only then has it migrated out. Lost is what a satellite held when it died and came back empty under
# the
# same books; a process that is killed takes its books with it, and the next one opens new ones at nothing.


Cause = Literal["replaced", "evicted", "deleted", "migrated_out", "lost"]
"""``replaced``: by another of the same name. ``evicted``: for room, by age or by a policy. ``deleted``: by command."""
CAUSES: tuple[Cause, ...] = ("replaced", "evicted", "deleted", "migrated_out", "lost")

Named = TypeVar("Named")


@dataclass(slots=True)
class Ledger:
    """Monotonic counters of bytes."""

    set_bytes: int = 0
    migrated_in_bytes: int = 0
    replaced_bytes: int = 0
    evicted_bytes: int = 0
    deleted_bytes: int = 0
    migrated_out_bytes: int = 0
    lost_bytes: int = 0

    def came(self, size_bytes: int, migrated: bool) -> None:
        """A writer, or (``migrated``) another satellite, brought so much."""
        if migrated:
            self.migrated_in_bytes += size_bytes
        else:
            self.set_bytes += size_bytes

    def went(self, size_bytes: int, cause: Cause) -> None:
        if cause == "replaced":
            self.replaced_bytes += size_bytes
        elif cause == "evicted":
            self.evicted_bytes += size_bytes
        elif cause == "deleted":
            self.deleted_bytes += size_bytes
        elif cause == "migrated_out":
            self.migrated_out_bytes += size_bytes
        else:
            self.lost_bytes += size_bytes

    def figures(self) -> dict[str, int]:
        """As ``messages.HOUSEKEEPING_FIELDS`` names them."""
        return {
            "bytes_set": self.set_bytes,
            "bytes_migrated_in": self.migrated_in_bytes,
            "bytes_replaced": self.replaced_bytes,
            "bytes_evicted": self.evicted_bytes,
            "bytes_deleted": self.deleted_bytes,
            "bytes_migrated_out": self.migrated_out_bytes,
            "bytes_lost": self.lost_bytes,
        }


def unaccounted_bytes(figures: Mapping[str, int]) -> int:
    """What came in and is neither held nor gone with a cause, by one satellite's housekeeping: 0 if its books close."""
    came = figures["bytes_set"] + figures["bytes_migrated_in"]
    return came - figures["memory_used_bytes"] - sum(figures[f"bytes_{cause}"] for cause in CAUSES)


def open_books(satellites: Mapping[Named, Mapping[str, int]]) -> dict[Named, int]:
    """The satellites whose books do not close, with the bytes they cannot account for; empty is as it must be."""
    gaps = {name: unaccounted_bytes(figures) for name, figures in satellites.items()}
    return {name: gap for name, gap in gaps.items() if gap}


def total(satellites: Mapping[Named, Mapping[str, int]]) -> dict[str, int]:
    """The books of all satellites together."""
    names = ["bytes_set", "bytes_migrated_in", "memory_used_bytes", *(f"bytes_{cause}" for cause in CAUSES)]
    return {name: sum(figures[name] for figures in satellites.values()) for name in names}
