"""Which shares of a value are not whole on this satellite, and who else has copies of them."""

from __future__ import annotations

from itertools import islice

from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.placement.locate import Moves
from skymemory.protocol.checks import MAX_CHECKS_PER_PACKET, Check
from skymemory.protocol.chunk_store import ChunkStore
from skymemory.protocol.motion import SkyMap
from skymemory.protocol.share import told_by
from skymemory.protocol.whereabouts import Whereabouts
from skymemory.protocol.wire import ChunkRef


class Copies:
    """As one satellite sees them, where ``replicas`` of each chunk are kept."""

    def __init__(
        self, here: SatelliteId, replicas: int, store: ChunkStore, whereabouts: Whereabouts, sky: SkyMap
    ) -> None:
        self._here = here
        self._replicas = range(replicas)
        self._store = store
        self._whereabouts = whereabouts
        self._sky = sky

    def to_ask(
        self, key: bytes, distance: int, before: Moves | None = None
    ) -> list[tuple[Check, tuple[SatelliteId, ...]]]:
        """Shares of a key that is here whose whole copies must be elsewhere if anywhere, with the satellites that may
        have them: those that are not whole here, and that of the server ``distance`` further in the ring.

        ``before`` the box moved, they were elsewhere; then both places may have them, and nothing needs to be here yet.
        """
        share = self._store.shares.get(key)
        if not share:
            return []
        packed = share[told_by(share)][0]
        ref = ChunkRef.unpack(packed)
        further = (ref.tag.server + distance) % min(ref.tag.servers, ref.chunks)
        shares = [*self._not_whole(packed, before is None), Check.of(packed, further)]
        wanted = dict.fromkeys(shares if self.missing(shares[-1]) else shares[:-1])
        return [(check, others) for check in wanted if (others := self.others(packed, check.server, before))]

    def gone(self, packed: bytes, before: Moves | None = None) -> list[tuple[Check, tuple[SatelliteId, ...]]]:
        """Of a value that chunks were evicted of here, one reference given: the shares that are not whole here, with
        the satellites of their other copies.
        """
        return [(check, self.others(packed, check.server, before)) for check in self._not_whole(packed, True)]

    def missing(self, check: Check) -> list[int]:
        """Which chunks of a share are not here, the first of them: as many as a proof asks about, whatever number a
        reference claims.
        """
        held = set(check.held_in(self._store.shares.get(check.key, {})))
        missing = (index for index in range(check.server, check.chunks, check.servers) if index not in held)
        return list(islice(missing, MAX_CHECKS_PER_PACKET))

    def others(self, packed: bytes, server: int, before: Moves | None = None) -> tuple[SatelliteId, ...]:
        """Where the copies of a server's share are, or were before: everybody but this satellite."""
        places: dict[SatelliteId, None] = {}
        for moves in dict.fromkeys((self._whereabouts.moves, before or self._whereabouts.moves)):
            for replica in self._replicas:
                try:
                    places[self._servers(packed, moves, replica)[server]] = None
                except InvalidInput:  # a box too small for so many copies, or a placement that we do not know
                    break
        return tuple(place for place in places if place != self._here)

    def _not_whole(self, packed: bytes, ours: bool) -> list[Check]:
        """The shares that we hold in part; and with ``ours`` those that belong here and of which we hold nothing."""
        ref = ChunkRef.unpack(packed)
        share = self._store.shares.get(ref.key, {})
        servers = {index % ref.tag.servers for index in share} if share else set[int]()
        if ours:
            servers |= self._belonging(packed)
        checks = [Check.of(packed, server) for server in sorted(servers) if server < ref.chunks]
        held = {check: len(check.held_in(share)) for check in checks}
        return [check for check in checks if held[check] < check.expected and (held[check] or ours)]

    def _belonging(self, packed: bytes) -> set[int]:
        """The servers of which some copy belongs here."""
        found = set[int]()
        for replica in self._replicas:
            try:
                places = self._servers(packed, self._whereabouts.moves, replica)
            except InvalidInput:
                break
            found.update(server for server, place in enumerate(places) if place == self._here)
        return found

    def _servers(self, packed: bytes, moves: Moves, replica: int) -> tuple[SatelliteId, ...]:
        tag = ChunkRef.unpack(packed).tag
        set_moves = tag.slot_moves, tag.plane_moves
        return self._sky.servers_at(tag.strategy, tag.servers, set_moves, moves, replica)
