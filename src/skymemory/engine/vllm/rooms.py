"""Room in the store's memory for the values that a step saves: a thread reserves it while the model computes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from skymemory.cache.blocks import TIER_FAILURES
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.kv.block import Place
from skymemory.store.base import Presence, StoreTicket

_log = logging.getLogger(__name__)

VALUES_TOGETHER = 16
"""Values of one ticket: they are stored together."""
_WAIT_S = 0.005  # wait of the model's thread for a store that has not answered yet


@dataclass(slots=True, eq=False)
class Room:
    """Room of item ``at`` of a ticket."""

    ticket: StoreTicket
    at: int
    value: memoryview


class RoomReserver:
    """Room for one step at a time in ``store``, which is ``InPlace``. Called by the model's thread."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._workers = TierWorkers("vllm room", 1)
        self._changed = threading.Condition()
        self._asking = self._is_wanted = False
        self._rooms: dict[bytes, Room] = {}

    def reserve(self, items: Sequence[tuple[bytes, int]], places: Sequence[Place]) -> None:
        """Begin to reserve room for those that the store lacks, unless it still owes an answer."""
        with self._changed:
            if self._asking or not items:
                return
            call: WorkerCall[object] = WorkerCall(lambda: self._reserve(items, places))
            self._asking = self._is_wanted = self._workers.submit(call)

    def take(self) -> dict[bytes, Room]:
        """Return the rooms by key; none if the store is slow."""
        with self._changed:
            if self._is_wanted:
                self._changed.wait_for(lambda: not self._asking, _WAIT_S)
            self._is_wanted = False
            rooms, self._rooms = self._rooms, {}
            return rooms

    def give_back(self, unused: Collection[Room], in_use: Collection[StoreTicket] = ()) -> None:
        """Leave rooms unwritten; tickets not in use are ended."""
        for room in unused:
            room.ticket.rooms[room.at] = None
        idle = {id(room.ticket): room.ticket for room in unused if room.ticket not in in_use}
        for ticket in idle.values():
            self._workers.submit(WorkerCall(lambda ticket=ticket: self._store.complete_store(ticket)))  # type: ignore[misc]

    def close(self) -> None:
        self.give_back(self.take().values())
        self._workers.close()

    def _reserve(self, items: Sequence[tuple[bytes, int]], places: Sequence[Place]) -> None:
        rooms: dict[bytes, Room] = {}
        try:
            presence = self._store.lookup([key for key, _ in items])
            missing = [at for at, state in enumerate(presence) if state is Presence.MISS]
            for first in range(0, len(missing), VALUES_TOGETHER):
                some = missing[first : first + VALUES_TOGETHER]
                ticket = self._store.prepare_rooms([items[at] for at in some], [places[at] for at in some])
                for number, (at, value) in enumerate(zip(some, ticket.rooms, strict=True)):
                    if value is not None:
                        rooms[items[at][0]] = Room(ticket, number, value)
                if ticket.rooms.count(None) == len(some):
                    self._store.complete_store(ticket)
        except TIER_FAILURES as error:
            _log.warning("no room could be reserved for values: %s", error)
        with self._changed:
            late = {} if self._is_wanted else rooms
            self._rooms, self._asking = {} if late else rooms, False
            self._changed.notify_all()
        self.give_back(late.values())
