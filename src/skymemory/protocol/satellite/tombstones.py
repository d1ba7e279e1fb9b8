"""Tombstones, and chunks and words that come too late: their key was set again since, or deleted."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.placement.locate import Moves
from skymemory.protocol.clock import SkyMap
from skymemory.protocol.messages import KEY_BYTES, Buffer
from skymemory.protocol.satellite.locator import Whereabouts
from skymemory.protocol.satellite.memory import Cause, ChunkStore
from skymemory.protocol.satellite.overload import MOST_AGE_S
from skymemory.protocol.wire import ChunkRef

_DELETED_S = 1.0
"""So long after a deletion its key is not taken over: as long as a client tells whoever holds chunks of it."""
_REMEMBERED_DELETIONS = 1 << 14
MOST_SINCE_S = 10.0
"""So long it is remembered that a writer stored a key."""
WRITING_S = 3.0
"""So long after a writer's last word (a SET, or RETAIN with WRITING, which comes each half second while it is at it)
its key counts as being written: five words in a row may be lost, or come late by as much.
"""
_REMEMBERED_SETS = 1 << 16
_SET_MOVES = struct.Struct(">ii")
_SET_MOVES_AT = 64


class Latecomers:
    """What one satellite must know to tell them."""

    def __init__(self, here: SatelliteId, sky: SkyMap, whereabouts: Whereabouts) -> None:
        self._here = here
        self._sky = sky
        self._whereabouts = whereabouts
        self._deleted: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        """Until when each key is not taken over, the first to end first; and which setting of it (empty: none)."""
        self._set: OrderedDict[bytes, float] = OrderedDict()
        """When writers stored keys, the earliest first."""
        self._sets_known_s = -math.inf
        """Since when all of these are remembered."""

    def delete(self, deleted: Iterable[tuple[bytes, bytes]], now_s: float) -> None:
        """These were deleted by command: keys, and settings of them (empty: all)."""
        while self._deleted and next(iter(self._deleted.values()))[0] <= now_s - MOST_AGE_S:
            self._deleted.popitem(last=False)
        for key, setting in deleted:
            if not setting:
                self._set.pop(key, None)
            self._deleted.pop(key, None)
            self._deleted[key] = now_s + _DELETED_S, setting
        while len(self._deleted) > _REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)

    def set_again(self, key: bytes, now_s: float) -> None:
        """A writer stored chunks of it."""
        if self._deleted:
            self._deleted.pop(key, None)
        self.still_written(key, now_s)

    def still_written(self, key: bytes, now_s: float) -> None:
        """A writer is still at it, here or elsewhere."""
        self._set[key] = now_s
        self._set.move_to_end(key)
        while len(self._set) > _REMEMBERED_SETS or next(iter(self._set.values())) < now_s - MOST_SINCE_S:
            self._sets_known_s = self._set.popitem(last=False)[1]

    def was_set_since(self, key: bytes, since_s: float) -> bool:
        """Whether a writer has stored chunks of the key since then, as far as is known; True where it is not."""
        return since_s <= self._sets_known_s or self._set.get(key, -math.inf) >= since_s

    def is_being_written(self, key: bytes, now_s: float) -> bool:
        """Whether a writer may still be at it; then what is not there may come yet, and is not lost."""
        return self.was_set_since(key, now_s - WRITING_S)

    def is_deleted(self, ref: bytes, came_s: float) -> bool:
        """Whether a chunk that was handed over at that time (and may have waited in ``postponed`` since) is to be taken
        for lost: if it still is where it comes from, it is sent again, and taken then.
        """
        until_s, setting = self._deleted.get(ref[:KEY_BYTES], (came_s, b""))
        return until_s > came_s and setting in (b"", setting_of(ref))

    def is_outdated(self, ref: bytes, held: bytes) -> bool:
        """Whether the chunk ``ref`` that is handed over was set before the one that is held in its place (packed
        references).

        A later value has more moves. At equal moves, and where the box goes back and forth, it is told by the place: a
        writer brings chunks to where they belong at the time, and from there nothing older can follow them.
        """
        if setting_of(ref) == setting_of(held):
            return False
        moves, held_moves = _set_moves(ref), _set_moves(held)
        if (moves == held_moves or held_moves == self._whereabouts.moves) and self._was_set_here(held):
            return True
        return sum(held_moves) > sum(moves)

    def _was_set_here(self, held: bytes) -> bool:
        tag = ChunkRef.unpack(held).tag
        moves = tag.slot_moves, tag.plane_moves
        placement = self._sky.placement(tag.strategy, tag.servers)
        return placement.locate(tag.server, moves, moves, tag.replica) == self._here


def _set_moves(ref: bytes) -> Moves:
    slot_moves, plane_moves = _SET_MOVES.unpack_from(ref, _SET_MOVES_AT)
    return slot_moves, plane_moves


# Which values are dead: a key and the setting of it that lost a chunk, so that a later setting of the key lives on.
#
# A value that is set again after the box has moved leaves chunks of the earlier setting where the new one has none.
# They are the first to be evicted; what is said of them must not cost the value that is there now.


Dead = tuple[bytes, bytes]
"""Key and setting."""
SETTING_BYTES = 12
DEAD_BYTES = KEY_BYTES + SETTING_BYTES
MAX_DEAD_PER_PACKET = 130
"""Of one NOTICE or GONE: their packet stays as small as one with a chunk of the default size."""
_COUNT = struct.Struct(">HH")
_SETTING = struct.Struct(">Iii")


def setting_of(ref: bytes) -> bytes:
    """Of a packed chunk reference: CRC of the value, slot moves and plane moves, as they stand there."""
    return ref[52:56] + ref[64:72]


def pack_setting(value_crc: int, slot_moves: int, plane_moves: int) -> bytes:
    """The same from numbers."""
    return _SETTING.pack(value_crc, slot_moves, plane_moves)


def drop(store: ChunkStore, dead: Iterable[Dead], cause: Cause = "evicted") -> int:
    """Remove the chunks of these settings; how many there were."""
    dropped = 0
    for key, setting in dead:
        indices = [index for index, (ref, _) in store.shares.get(key, {}).items() if setting_of(ref) == setting]
        dropped += sum(store.remove((key, index), cause) for index in indices)
    return dropped


def pack_dead(dead: Sequence[Dead]) -> bytes:
    """Body of GONE."""
    if not 1 <= len(dead) <= MAX_DEAD_PER_PACKET:
        raise InvalidInput(f"{len(dead)} dead values in one packet: expected 1 to {MAX_DEAD_PER_PACKET}")
    return _COUNT.pack(len(dead), 0) + join_dead(dead)


def pack_forget(dead: Sequence[Dead], since_s: float) -> bytes:
    """Body of FORGET: these, but what was stored in the last ``since_s`` (65 s at most, in whole ms)."""
    since_ms = math.ceil(since_s * 1000)
    if not 1 <= len(dead) <= MAX_DEAD_PER_PACKET or not 0 <= since_ms <= 0xFFFF:
        raise InvalidInput(
            f"{len(dead)} values to forget of {since_s} s ago: expected 1 to {MAX_DEAD_PER_PACKET}, and 0 to 65.5 s"
        )
    return _COUNT.pack(len(dead), since_ms) + join_dead(dead)


def unpack_forget(body: Buffer) -> tuple[list[Dead], float]:
    """Inverse of ``pack_forget``."""
    if len(body) < _COUNT.size:
        raise MalformedPacket("FORGET without its count")
    count, since_ms = _COUNT.unpack_from(body)
    return split_dead(body[_COUNT.size :], count), since_ms / 1000


def unpack_dead(body: Buffer) -> list[Dead]:
    if len(body) < _COUNT.size:
        raise MalformedPacket("list of dead values without its count")
    return split_dead(body[_COUNT.size :], _COUNT.unpack_from(body)[0])


def join_dead(dead: Sequence[Dead]) -> bytes:
    return b"".join(key + setting for key, setting in dead)


def split_dead(body: Buffer, count: int) -> list[Dead]:
    """Inverse of ``join_dead`` for ``count`` of them; ``MalformedPacket`` where they are not so many bytes."""
    if not 1 <= count <= MAX_DEAD_PER_PACKET or len(body) != count * DEAD_BYTES:
        raise MalformedPacket(f"{count} dead values in {len(body)} bytes")
    return [
        (bytes(body[at : at + KEY_BYTES]), bytes(body[at + KEY_BYTES : at + DEAD_BYTES]))
        for at in range(0, len(body), DEAD_BYTES)
    ]
