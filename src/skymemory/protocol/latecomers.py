"""Chunks handed over too late: a writer has set their key again since, or somebody has deleted it.

A handover is sent again until it is acknowledged, and links take their time. So what it brings may be older than what
is here, or be of a value that the sender and we were both told to forget while it was on its way.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.locate import Moves
from skymemory.protocol.dead import setting_of
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.whereabouts import Whereabouts
from skymemory.protocol.wire import ChunkRef

_DELETED_S = 1.0
"""So long after a deletion its key is not taken over: as long as a client tells whoever holds chunks of it."""
_REMEMBERED_DELETIONS = 1 << 14
_SET_MOVES = struct.Struct(">ii")
_SET_MOVES_AT = 64


class Latecomers:
    """What one satellite must know to tell them."""

    def __init__(self, here: SatelliteId, sky: SkyMap, whereabouts: Whereabouts) -> None:
        self._here = here
        self._sky = sky
        self._whereabouts = whereabouts
        self._deleted: OrderedDict[bytes, float] = OrderedDict()
        """Until when each key is not taken over, the first to end first."""

    def delete(self, keys: Iterable[bytes], now_s: float) -> None:
        """These were deleted by command."""
        while self._deleted and next(iter(self._deleted.values())) <= now_s:
            self._deleted.popitem(last=False)
        for key in keys:
            self._deleted.pop(key, None)
            self._deleted[key] = now_s + _DELETED_S
        while len(self._deleted) > _REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)

    def set_again(self, key: bytes) -> None:
        """A writer stored chunks of it."""
        if self._deleted:
            self._deleted.pop(key, None)

    def is_deleted(self, key: bytes, now_s: float) -> bool:
        """Whether what is handed over of the key is to be taken for lost: if it still is where it comes from, it is
        sent again, and taken then.
        """
        return self._deleted.get(key, now_s) > now_s

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
