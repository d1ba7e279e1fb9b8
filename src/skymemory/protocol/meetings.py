"""Two copies of a chunk on one satellite: when the box has moved far at once, one may come before the other has left.

A satellite has one place for a chunk, whichever copy it is; the bytes are the same. So it keeps one, as the copy that
belongs here, and sends the other on from the same bytes, under its own number.
"""

from __future__ import annotations

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.chunk_store import ChunkStore
from skymemory.protocol.handover import Handover
from skymemory.protocol.share import ChunkName, as_copy
from skymemory.protocol.whereabouts import Whereabouts
from skymemory.protocol.wire import REPLICA_OFFSET


class Meetings:
    """Settles them for one satellite."""

    def __init__(self, here: SatelliteId, store: ChunkStore, handover: Handover, whereabouts: Whereabouts) -> None:
        self._here = here
        self._store = store
        self._handover = handover
        self._whereabouts = whereabouts

    def settle(self, due_s: float) -> None:
        """Chunks were stored in place of other copies of them. What came and belongs elsewhere leaves at ``due_s``."""
        met, self._store.met = self._store.met, []
        for name, before in met:
            chunk = self._store.peek(name)
            if chunk is None or chunk.ref != as_copy(before, chunk.ref[REPLICA_OFFSET]):
                continue
            if self._whereabouts.home(before) == self._here:
                self._store.relabel(name, before)
                self._handover.stray((*name, chunk.ref[REPLICA_OFFSET]), due_s)
            else:
                self._handover.leave_as(name, before[REPLICA_OFFSET])

    def send_as(self, name: ChunkName, replica: int) -> None:
        """The chunk, if it is here still, is to be where its copy ``replica`` belongs."""
        chunk = self._store.peek(name)
        if chunk is None or chunk.ref[REPLICA_OFFSET] == replica:
            return
        copy = as_copy(chunk.ref, replica)
        home = self._whereabouts.home(copy)
        if home != self._here:
            self._handover.enqueue(home, [(*name, replica)])
        elif self._whereabouts.home(chunk.ref) != self._here:
            self._store.relabel(name, copy)
            self._handover.leave_as(name, chunk.ref[REPLICA_OFFSET])
