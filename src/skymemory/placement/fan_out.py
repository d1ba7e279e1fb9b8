"""On how many satellites to put a value: a small one on the nearest alone, a large one on as many as its bytes pay for.

The time to fetch a value of n chunks from s servers is bounded by its slowest server (spec §4, bound (i), where
processing a chunk takes less than transmitting it):

    round trip to the farthest satellite of the box of s  +  ⌈n / s⌉ · transmission of a chunk  +  s · ``_SERVER_S``

A satellite gets at most ``_MOST_BYTES`` of a value, though links may carry more: it takes so much at once, and of
several writers the packets would otherwise overrun it.

Small boxes lie inside large ones, so the nearest satellite has a share of every value; a small box is carried whole at
every move of the overhead point; and where one satellite is full, it evicts a share of a value that is then lost on all
others. So values on s servers and fewer may have a fifth of a satellite's memory, and only what those on more leave
free, but always a little. Else the next best number is taken. What was set long ago has been evicted, or soon is: it
counts less and less (``held``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.layout import Box
from skymemory.placement.locate import Moves, Placement

BEAM_BYTES_PER_S = 150e6
"""What one beam to a ground host carries: 1.2 Gbit/s, a channel of 400 MHz in Ka band at 550 km (the budget of 3GPP
TR 38.821 in ``sim.loading.LinkBudget``).
"""
_SERVER_S = 25e-6
"""One more request to pack, send and answer, as measured on one computer."""
_MOST_BYTES = 4 << 20
_NEAR_SHARE, _LEAST_SHARE = 0.2, 1 / 32
"""The larger is below what a satellite leases (a quarter), so that loads of such values can be leased."""


@dataclass(frozen=True)
class FanOut:
    """``round_trips_s``: to the farthest satellite of the box of each number of servers to choose from; any value may
    have the largest of them. ``chunk_s``: transmission of a chunk over one beam. ``memory_bytes``: of a satellite; 0:
    unknown, and none is too full. ``replicas``: copies of each value.
    """

    round_trips_s: Mapping[int, float]
    chunk_s: float
    memory_bytes: int = 0
    replicas: int = 1
    _ranked: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        placement: Callable[[int], Placement],
        most: int,
        moves: Moves,
        round_trip_s: Callable[[SatelliteId], float],
        chunk_s: float,
        memory_bytes: int = 0,
        replicas: int = 1,
    ) -> FanOut:
        """Full boxes of at most ``most`` servers, and ``most`` itself. A box must hold all ``replicas`` of a chunk, on
        as many planes as the largest box does, and have a plane more: with one dead, others still know of some chunk
        that all its copies are gone (a delete is then sure). ``round_trip_s``: to each satellite of the boxes at
        ``moves``.
        """
        planes = min(replicas + 1 if replicas > 1 else 1, placement(most).box.height)

        def has_room(box: Box) -> bool:
            return box.width * box.height >= replicas and box.height >= planes

        chosen: dict[int, float] = {}
        for servers in range(1, most + 1):
            box = placement(servers).box
            if servers == most or (servers == box.width * box.height and has_room(box)):
                chosen[servers] = max(map(round_trip_s, placement(servers).box_satellites(moves)))
        return cls(chosen, chunk_s, memory_bytes, replicas)

    def seconds(self, servers: int, chunks: int) -> float:
        """To fetch this many chunks from so many servers."""
        return self.round_trips_s[servers] + -(-chunks // servers) * self.chunk_s + servers * _SERVER_S

    def servers(self, chunks: int, value_bytes: int, held: Mapping[int, float]) -> int:
        """For one value. ``held``: bytes in the sky by number of servers (``RadixIndex.bytes_by_servers``)."""
        ranked = self._ranked.get(chunks)
        if ranked is None:
            if len(self._ranked) > 1024:
                self._ranked.clear()
            ranked = tuple(sorted(self.round_trips_s, key=lambda servers: self.seconds(servers, chunks)))
            self._ranked[chunks] = ranked
        most = max(self.round_trips_s)
        return next((one for one in ranked if one == most or self._has_room(one, value_bytes, held)), most)

    def _has_room(self, servers: int, value_bytes: int, held: Mapping[int, float]) -> bool:
        """Whether its satellites may have this much of a value, and the nearest, with a share of each, has room."""
        if value_bytes > servers * _MOST_BYTES:
            return False
        if not self.memory_bytes:
            return True
        room_bytes = self.memory_bytes / self.replicas
        near_bytes = value_bytes / servers + sum(its / number for number, its in held.items() if number <= servers)
        others_bytes = sum(its / number for number, its in held.items() if number > servers)
        free_bytes = max(room_bytes - others_bytes, room_bytes * _LEAST_SHARE)
        return near_bytes <= min(free_bytes, room_bytes * _NEAR_SHARE)
