"""Sends what a satellite has to hand over: the plan of ``Handover`` turned into MIGRATE packets."""

from __future__ import annotations

from skymemory.constellation.torus import SatelliteId
from skymemory.metrics import Counters
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.messages import Packet, Selection
from skymemory.protocol.satellite.config import SatelliteConfig
from skymemory.protocol.satellite.eviction import Forgetting
from skymemory.protocol.satellite.handover import Burst, Handover, Leaving, Pacer, phase_of
from skymemory.protocol.satellite.locator import Whereabouts
from skymemory.protocol.satellite.memory import Chunk, ChunkName, ChunkStore, as_copy
from skymemory.protocol.satellite.outbox import Departures
from skymemory.protocol.satellite.overload import Lateness
from skymemory.protocol.wire import REPLICA_OFFSET, Address, Status, since_s


def handover_of(config: SatelliteConfig, lateness: Lateness | None = None) -> Handover:
    """One that begins at a time of its own after each move."""
    pacer = Pacer(config.handover_gap_s, phase_of(config.address))
    return Handover(config.handover_window_bursts, config.handover_timeout_s, config.handover_grace_s, pacer, lateness)


class Migration:
    """The hands of one satellite's ``Handover``."""

    def __init__(
        self,
        here: SatelliteId,
        store: ChunkStore,
        handover: Handover,
        whereabouts: Whereabouts,
        departures: Departures,
        forgetting: Forgetting,
        counters: Counters,
    ) -> None:
        self._here = here
        self._store = store
        self._handover = handover
        self._whereabouts = whereabouts
        self._departures = departures
        self._forgetting = forgetting
        self._counters = counters
        self.meetings = Meetings(here, store, handover, whereabouts)
        self._planning = Throttle()
        self._in_haste = False

    def box_moved(self, in_haste: bool = False) -> None:
        """What must leave is to be worked out anew, by ``send_due``: once for all moves until then. ``in_haste``: an
        operator moved the box.
        """
        self._handover.moved = True
        self._in_haste |= in_haste

    @property
    def _plan_s(self) -> float:
        """When a plan may be made. The clock's own moves are as rare as it makes them; pushes, which may be forged, are
        throttled.
        """
        return self._planning.open_s if self._in_haste else 0.0

    def next_timer_s(self) -> float | None:
        times_s = [self._handover.next_timer_s(), self._plan_s if self._handover.moved else None]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _plan(self, now_s: float) -> None:
        """Queue what must leave now, whatever was to leave before."""
        if self._in_haste:
            self._planning.done(now_s)
        in_haste, self._in_haste = self._in_haste, False
        others = self._handover.plan(self._store, self._whereabouts.home_of_tag, self._here)
        for key, index, replica in others:
            self.meetings.send_as((key, index), replica)
        self._handover.spread(now_s, self._whereabouts.interval_s(now_s), in_haste)

    def send_due(self, now_s: float) -> None:
        """All that is to leave now: strays whose time has come, fresh bursts, and those not acknowledged in time."""
        if self._handover.moved and now_s >= self._plan_s:
            self._plan(now_s)
        elsewhere: dict[SatelliteId, list[Leaving]] = {}
        for name in self._handover.strays_due(now_s):
            if len(name) == 3:
                self.meetings.send_as(name[:2], name[2])
                continue
            chunk = self._store.peek(name)
            if chunk is not None and (home := self._whereabouts.home(chunk.ref)) != self._here:
                elsewhere.setdefault(home, []).append(name)
        for home, names in elsewhere.items():
            self._handover.enqueue(home, names)
        while bursts := self._handover.bursts_to_send(now_s):
            for burst in bursts:
                self._send(burst, now_s)

    def acknowledged(self, packet: Packet, now_s: float) -> None:
        """Another satellite took (or refused) chunks we handed over."""
        if packet.header.status is not Status.OK:
            self._handover.refused(packet.header.request_id, now_s, full=True)
        else:
            selection = Selection.unpack(packet.body)
            names = [(selection.key, index) for index in selection.indices()]
            sent_s = now_s - elapsed_s if (elapsed_s := since_s(packet.header.timestamp_us, now_s)) else 0.0
            moved = self._handover.acknowledged(packet.header.request_id, names, now_s, sent_s)
            self._counters.add("chunks_migrated_out", moved)
            if moved:
                self._forgetting.handed_over(packet.header.source, selection.key, now_s)

    def unreachable(self, packet: Packet, now_s: float) -> None:
        """There is no way to whom we wanted to hand chunks over to."""
        self._counters.add("packets_unroutable")
        self._handover.refused(packet.header.request_id, now_s)

    def _send(self, burst: Burst, now_s: float) -> None:
        self._forgetting.to_send(burst, now_s)
        found = {name: chunk for name in burst.names if (chunk := self._chunk(name)) is not None}
        if len(found) < len(burst.names):
            self._handover.forget(burst, set(burst.names) - found.keys())
        if found:
            there = Address(burst.destination.plane, burst.destination.slot)
            self._departures.migrate(there, burst.request_id, list(found.values()), now_s)

    def _chunk(self, name: Leaving) -> Chunk | None:
        """It, as the copy that it leaves as."""
        chunk = self._store.peek(name[:2])
        if chunk is None or len(name) == 2:
            return chunk
        return as_copy(chunk.ref, name[2]), chunk.payload


# Two copies of a chunk on one satellite: when the box has moved far at once, one may come before the other has left.
#
# A satellite has one place for a chunk, whichever copy it is; the bytes are the same. So it keeps one, as the copy
# that
# belongs here, and sends the other on from the same bytes, under its own number.


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
