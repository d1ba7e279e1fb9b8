"""Handler of handovers: turns the plan of ``ChunkHandover`` into MIGRATE packets, and the ACKs into deletions.

If two copies of a chunk meet, the satellite keeps the copy that belongs here and sends the other on.
"""

from __future__ import annotations

import math

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.messages import Selection
from skymemory.protocol.satellite.handover import Leaving, MigrateBurst
from skymemory.protocol.satellite.memory import Chunk, ChunkName, as_copy
from skymemory.protocol.satellite.retention import Retention
from skymemory.protocol.satellite.state import SatelliteState
from skymemory.protocol.satellite.sweep import Sweep
from skymemory.protocol.wire import REPLICA_OFFSET, Op, Packet, SkyHeader, Status, since_s


class Migration:
    def __init__(self, state: SatelliteState, sweep: Sweep, retention: Retention) -> None:
        self._here = state.here
        self._store = state.store
        self._handover = state.handover
        self._locator = state.locator
        self._outbox = state.outbox
        self._counters = state.counters
        self._sweep = sweep
        self._retention = retention
        self._plan_throttle = Throttle()
        self._urgent = False

    # --- Chunks arrive ---

    def stored(self, key: bytes, indices: list[int], ref: bytes, header: SkyHeader, now_s: float) -> None:
        """Record stored chunks; if the box has moved, they leave again, perhaps later: their sender may know of a later
        move.
        """
        sent_behind = self._locator.is_past((header.slot_moves, header.plane_moves))
        due_s = now_s if header.op is not Op.MIGRATE or sent_behind else now_s + self._handover.grace_s
        if self._store.conflicts:
            self._resolve_conflicts(due_s)
        self._handover.keep(key, indices)
        if self._locator.home(ref) != self._here:
            for index in indices:
                self._handover.stray((key, index), due_s)

    def _resolve_conflicts(self, due_s: float) -> None:
        """Settle chunks stored in place of other copies."""
        conflicts, self._store.conflicts = self._store.conflicts, []
        for name, before in conflicts:
            chunk = self._store.peek(name)
            if chunk is None or chunk.ref != as_copy(before, chunk.ref[REPLICA_OFFSET]):
                continue
            if self._locator.home(before) == self._here:  # the stored copy stays, the new copy leaves
                self._store.relabel(name, before)
                self._handover.stray((*name, chunk.ref[REPLICA_OFFSET]), due_s)
            else:
                self._handover.leave_as(name, before[REPLICA_OFFSET])

    # --- The box moves: plan, send, delete ---

    def box_moved(self, urgent: bool = False) -> None:
        """Let ``send_due`` plan the handover, once for several moves. ``urgent``: an operator moved the box."""
        self._handover.moved = True
        self._urgent |= urgent

    @property
    def _next_plan_s(self) -> float:
        return self._plan_throttle.open_s if self._urgent else 0.0

    def next_timer_s(self) -> float:
        handover_s = self._handover.next_timer_s()
        soonest_s = math.inf if handover_s is None else handover_s
        return min(soonest_s, self._next_plan_s) if self._handover.moved else soonest_s

    def send_due(self, now_s: float) -> None:
        """Plan the handover if the box has moved, queue strays that belong elsewhere, and send bursts that are due."""
        if self._handover.moved and now_s >= self._next_plan_s:
            self._plan_handover(now_s)
        elsewhere: dict[SatelliteId, list[Leaving]] = {}
        for name in self._handover.strays_due(now_s):
            if len(name) == 3:
                self._send_as_copy(name[:2], name[2])
                continue
            chunk = self._store.peek(name)
            if chunk is not None and (home := self._locator.home(chunk.ref)) != self._here:
                elsewhere.setdefault(home, []).append(name)
        for home, names in elsewhere.items():
            self._handover.enqueue(home, names)
        while bursts := self._handover.bursts_to_send(now_s):  # again: a burst held back frees space in the window
            for burst in bursts:
                self._send_burst(burst, now_s)

    def _plan_handover(self, now_s: float) -> None:
        if self._urgent:
            self._plan_throttle.done(now_s)
        urgent, self._urgent = self._urgent, False
        leaving_as_others = self._handover.plan(self._store, self._locator.home_of_tag, self._here)
        for key, index, replica in leaving_as_others:
            self._send_as_copy((key, index), replica)
        self._handover.spread(now_s, self._locator.interval_s(now_s), urgent)

    def _send_as_copy(self, name: ChunkName, replica: int) -> None:
        """Let a chunk leave as copy ``replica``; if that copy belongs here, keep it as such and let the stored copy
        leave.
        """
        chunk = self._store.peek(name)
        if chunk is None or chunk.ref[REPLICA_OFFSET] == replica:
            return
        copy = as_copy(chunk.ref, replica)
        try:
            home = self._locator.home(copy)
        except InvalidInput:  # another value has taken its place since, in a box too small for this copy
            return
        if home != self._here:
            self._handover.enqueue(home, [(*name, replica)])
        elif self._locator.home(chunk.ref) != self._here:
            self._store.relabel(name, copy)
            self._handover.leave_as(name, chunk.ref[REPLICA_OFFSET])

    def _send_burst(self, burst: MigrateBurst, now_s: float) -> None:
        self._sweep.hold_back(burst, now_s)
        chunks = {name: chunk for name in burst.names if (chunk := self._get_chunk_to_send(name)) is not None}
        if len(chunks) < len(burst.names):
            self._handover.forget(burst, set(burst.names) - chunks.keys())
        if chunks:
            self._outbox.migrate(burst.destination, burst.request_id, list(chunks.values()), now_s)

    def _get_chunk_to_send(self, name: Leaving) -> Chunk | None:
        chunk = self._store.peek(name[:2])
        if chunk is None or len(name) == 2:
            return chunk
        return as_copy(chunk.ref, name[2]), chunk.payload

    def delete_copied(self, now_s: float) -> None:
        """Delete copied chunks, unless they belong here again."""
        for name in self._handover.to_delete(now_s):
            chunk = self._store.peek(name)
            if chunk is not None and self._locator.home(chunk.ref) != self._here:
                self._store.remove(name, "migrated_out")

    # --- Answers ---

    def acknowledged(self, packet: Packet, now_s: float) -> None:
        satellite = SatelliteId(packet.header.source.plane, packet.header.source.slot)
        if not self._handover.awaits(packet.header.request_id, satellite):
            return
        if packet.header.status is not Status.OK:
            self._handover.refused(packet.header.request_id, now_s, full=True)
            return
        selection = Selection.unpack(packet.body)
        names = [(selection.key, index) for index in selection.indices()]
        sent_s = now_s - elapsed_s if (elapsed_s := since_s(packet.header.timestamp_us, now_s)) else 0.0
        moved = self._handover.acknowledged(packet.header.request_id, names, now_s, sent_s)
        self._counters.add("chunks_migrated_out", moved)
        if moved:
            self._retention.handed_over(satellite, selection.key, now_s)

    def unreachable(self, packet: Packet, now_s: float) -> None:
        self._counters.add("packets_unroutable")
        self._handover.refused(packet.header.request_id, now_s)
