"""Copies that were lost are made anew, by the satellites that have the others.

Now and then a satellite asks, of each server's share that it holds whole, the satellite of the *next* copy (the one
after the last is the first) whether it has its own. Where some of it is not there, and there is room, the chunks are
sent, as that copy. So a satellite or plane that came back empty is filled again by those that stayed alive, read or
not; what was evicted for want of room is not pushed back in. Nothing is asked or sent while chunks are handed over.
"""

from __future__ import annotations

import math

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.metrics import Counters
from skymemory.placement.locate import Moves
from skymemory.protocol.checks import MAX_CHECKS_PER_PACKET, Answer, Check, Checks, Found
from skymemory.protocol.chunk_store import ChunkStore
from skymemory.protocol.dead import setting_of
from skymemory.protocol.handover import Handover
from skymemory.protocol.share import as_copy, told_by
from skymemory.protocol.whereabouts import Whereabouts
from skymemory.protocol.wire import CHUNK_REF_BYTES, REPLICA_OFFSET, ChunkRef

_MOST_PACKETS = 8
"""CHECKs of one sweep; the next goes on where it stopped."""
MOST_BYTES = 16 << 20
"""What one satellite sends for one sweep: copies are made in the background."""


class Mending:
    """One satellite's part of it. ``replicas`` 1: none."""

    def __init__(
        self, here: SatelliteId, replicas: int, sweep_s: float, store: ChunkStore, whereabouts: Whereabouts,
        checks: Checks, handover: Handover, counters: Counters, now_s: float,
    ) -> None:  # fmt: skip
        self._here = here
        self._replicas = replicas
        self._sweep_s = sweep_s
        self._store = store
        self._whereabouts = whereabouts
        self._checks = checks
        self._handover = handover
        self._counters = counters
        self._swept_to = b""
        self._swept_moves: Moves = whereabouts.moves
        self._left_bytes = 0
        self.next_s = now_s + sweep_s if replicas > 1 else math.inf
        """When ``handle_timer`` has something to do; infinite: never."""

    def handle_timer(self, now_s: float) -> None:
        if now_s < self.next_s:
            return
        self.next_s = now_s + self._sweep_s
        still = self._whereabouts.moves == self._swept_moves and self._handover.at_rest
        self._swept_moves = self._whereabouts.moves
        if still:
            self._left_bytes = MOST_BYTES
            self._sweep(now_s)

    def _sweep(self, now_s: float) -> None:
        limit = _MOST_PACKETS * MAX_CHECKS_PER_PACKET
        keys = self._store.keys_after(self._swept_to, limit)
        self._swept_to = keys[-1] if len(keys) == limit else b""
        by_place: dict[SatelliteId, list[Check]] = {}
        asked = 0
        for key in keys:
            for place, check in self._next_copies(key):
                by_place.setdefault(place, []).append(check)
                asked += 1
            if asked >= limit:
                self._swept_to = key
                break
        for place, checks in by_place.items():
            self._checks.ask(place, checks, self._heard, now_s)

    def _next_copies(self, key: bytes) -> list[tuple[SatelliteId, Check]]:
        """Who should have the next copy of what we hold whole of the latest setting of a key."""
        found = []
        for (_, replica), (check, indices) in self._whole(key).items():
            ref = self._store.shares[key][indices[0]][0]
            try:
                place = self._whereabouts.home(as_copy(ref, (replica + 1) % self._replicas))
                ours = self._whereabouts.home(ref) == self._here
            except InvalidInput:  # a box too small for so many copies
                continue
            if ours and place != self._here:
                found.append((place, check))
        return found

    def _whole(self, key: bytes) -> dict[tuple[int, int], tuple[Check, list[int]]]:
        """Of which servers, and as which copy, we hold all chunks; and which these are."""
        share = self._store.shares.get(key)
        if not share:
            return {}
        latest = share[told_by(share)][0]
        servers = ChunkRef.unpack(latest).tag.servers
        groups: dict[tuple[int, int], list[int]] = {}
        for index, (ref, _) in share.items():
            if setting_of(ref) == setting_of(latest):
                groups.setdefault((index % servers, ref[REPLICA_OFFSET]), []).append(index)
        checks = {name: (Check.of(latest, name[0]), indices) for name, indices in groups.items()}
        return {name: one for name, one in checks.items() if len(one[1]) == one[0].expected}

    def _heard(self, answer: Answer, now_s: float) -> None:
        """Send what is lacking there, as far as the budget goes."""
        if not answer.same_moves:
            return
        for check, what in zip(answer.checks, answer.found, strict=True):
            if what is not Found.LACKING or self._left_bytes <= 0:
                continue
            for (server, replica), (ours, indices) in self._whole(check.key).items():
                copy = (replica + 1) % self._replicas
                if server != check.server or ours.setting != check.setting:
                    continue
                ref = self._store.shares[check.key][indices[0]][0]
                if self._whereabouts.home(as_copy(ref, copy)) == answer.place:
                    self._left_bytes -= len(indices) * (check.length_bytes + CHUNK_REF_BYTES)
                    self._counters.add("copies_mended", len(indices))
                    self._handover.enqueue(answer.place, [(check.key, index, copy) for index in indices])
