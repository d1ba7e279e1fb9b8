"""Number of satellites for a value: small values go to the nearest, large values to as many as pay off.

A value of n chunks from s servers takes (spec §4, bound (i), if transmitting a chunk outlasts processing it):

    round trip to the farthest satellite of the box of s  +  ⌈n / s⌉ · transmission of a chunk  +  s · ``_SERVER_S``

A satellite gets at most ``_MOST_BYTES`` of a value, or several writers would overrun it.

The nearest satellite has a share of every value, so values on s servers or fewer may take only a fifth of its memory,
and only what values on more servers leave free, but always a little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skymemory.constellation.torus import SatelliteId
from skymemory.placement.layout import Box
from skymemory.placement.locate import Moves, Placement

BEAM_BYTES_PER_S = 150e6
"""Rate of a beam of 400 MHz in Ka band at 550 km (3GPP TR 38.821)."""
_SERVER_S = 25e-6
_MOST_BYTES = 4 << 20
_NEAR_SHARE, _LEAST_SHARE = 0.2, 1 / 32


def round_trips_of(
    placement: Callable[[int], Placement],
    most: int,
    moves: Moves,
    round_trip_s: Callable[[SatelliteId], float],
    replicas: int = 1,
) -> dict[int, float]:
    """Return the round trips by number of servers, of full boxes of at most ``most`` servers and of ``most`` itself. A
    box must hold all ``replicas`` of a chunk and, if possible, another plane, which knows when all copies are gone.
    """
    planes = min(replicas + 1 if replicas > 1 else 1, placement(most).box.height)

    def has_room(box: Box) -> bool:
        return box.width * box.height >= replicas and box.height >= planes

    chosen: dict[int, float] = {}
    for servers in range(1, most + 1):
        box = placement(servers).box
        if servers == most or (servers == box.width * box.height and has_room(box)):
            chosen[servers] = max(map(round_trip_s, placement(servers).box_satellites(moves)))
    return chosen


@dataclass(frozen=True)
class FanOut:
    """Choice of the number of servers, satellites that share a value's chunks.

    ``round_trips_s``: to the farthest satellite of the box, by number of servers. ``chunk_s``: transmission of a chunk.
    ``memory_bytes``: of a satellite; 0: unknown.
    """

    round_trips_s: Mapping[int, float]
    chunk_s: float
    memory_bytes: int = 0
    replicas: int = 1
    _ranked: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, servers: int, chunks: int) -> float:
        return self.round_trips_s[servers] + -(-chunks // servers) * self.chunk_s + servers * _SERVER_S

    def servers(self, chunks: int, value_bytes: int, bytes_by_servers: Mapping[int, float]) -> int:
        """Return the number of servers for a value. ``bytes_by_servers``: see ``RadixIndex.bytes_by_servers``."""
        ranked = self._ranked.get(chunks)
        if ranked is None:
            if len(self._ranked) > 1024:
                self._ranked.clear()
            ranked = tuple(sorted(self.round_trips_s, key=lambda servers: self.seconds(servers, chunks)))
            self._ranked[chunks] = ranked
        most = max(self.round_trips_s)
        return next(
            (count for count in ranked if count == most or self._has_room(count, value_bytes, bytes_by_servers)), most
        )

    def _has_room(self, servers: int, value_bytes: int, bytes_by_servers: Mapping[int, float]) -> bool:
        """Return True if satellites may take such a value: the nearest also hold shares of values on more servers."""
        if value_bytes > servers * _MOST_BYTES:
            return False
        if not self.memory_bytes:
            return True
        room_bytes = self.memory_bytes / self.replicas
        near_bytes = value_bytes / servers + sum(
            size_bytes / number for number, size_bytes in bytes_by_servers.items() if number <= servers
        )
        others_bytes = sum(size_bytes / number for number, size_bytes in bytes_by_servers.items() if number > servers)
        free_bytes = max(room_bytes - others_bytes, room_bytes * _LEAST_SHARE)
        return near_bytes <= min(free_bytes, room_bytes * _NEAR_SHARE)
