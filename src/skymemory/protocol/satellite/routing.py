"""Routing on shortest paths around links that are down."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from skymemory import native
from skymemory.constellation.torus import Axis, RoutingMode, SatelliteId, Torus
from skymemory.errors import InvalidInput, MalformedPacket
from skymemory.protocol.congestion import Throttle
from skymemory.protocol.wire import (
    GROUND_SHELL,
    MAX_MOVES,
    Address,
    Buffer,
    LinkEnd,
    SegmentBatch,
    Status,
    header_start,
)

_KNOWN_GROUND_HOSTS = 4096
_GROUND_OFFSET = 12
_ARRIVAL_BITS: dict[Axis | None, int] = {None: 0, "slot": native.BY_SLOT_LINK, "plane": native.BY_PLANE_LINK}


class Router:
    """Routing at a satellite. A ground host is reached by its last packet's link."""

    def __init__(self, own: SatelliteId, torus: Torus, mode: RoutingMode, links: LinkState | None = None) -> None:
        self._links = links or LinkState(torus)
        self._here = own
        self._torus = torus
        self._mode = mode
        self._ground_links: OrderedDict[int, LinkEnd] = OrderedDict()
        self._next_hops: dict[int, SatelliteId] = {}
        self._changes = self._links.changes

    def remember(self, ground: int, link: LinkEnd) -> None:
        self._ground_links[ground] = link
        self._ground_links.move_to_end(ground)
        if len(self._ground_links) > _KNOWN_GROUND_HOSTS:
            self._ground_links.popitem(last=False)

    def known(self) -> tuple[dict[int, SatelliteId], dict[int, LinkEnd]]:
        """Return valid next hops, and beams of ground hosts."""
        if self._changes != self._links.changes:
            self._changes = self._links.changes
            self._next_hops.clear()
        return self._next_hops, self._ground_links

    def heard_last(self, most: int) -> list[int]:
        return list(islice(reversed(self._ground_links), most))

    def exit_for(self, destination: Address, packet: Buffer) -> LinkEnd | None:
        """Return the link by which a packet leaves this satellite, if any."""
        target = SatelliteId(destination.plane, destination.slot)
        if target == self._here:
            return self._get_beam(destination, packet)
        if target not in self._torus:
            return None
        return self._get_next_hop(target)

    def forward(
        self, view: memoryview, segment_bytes: int, destination: Address, source: LinkEnd
    ) -> tuple[SegmentBatch, LinkEnd] | Status:
        """Return packets in transit, hops counted, and their next link; or why there is none."""
        target = SatelliteId(destination.plane, destination.slot)
        if target == self._here:
            beam = self._get_beam(destination, view)
            return Status.NO_ROUTE if beam is None else (SegmentBatch(bytearray(view), segment_bytes), beam)
        arrival_axis: Axis | None = None
        if isinstance(source, SatelliteId):
            arrival_axis = "slot" if source.plane == self._here.plane else "plane"
        onward = self._get_next_hop(target, arrival_axis) if target in self._torus else None
        if onward is None:
            return Status.NO_ROUTE
        packets = native.count_hops(view, segment_bytes)
        return Status.HOP_LIMIT if packets is None else (SegmentBatch(packets, segment_bytes), onward)

    def _get_next_hop(self, target: SatelliteId, came_axis: Axis | None = None) -> SatelliteId | None:
        """Return the neighbour on the way to ``target``, cached; ``came_axis``: axis of the link by which the packet
        arrived.
        """
        next_hops, _ = self.known()
        key = target.plane << 12 | target.slot | _ARRIVAL_BITS[came_axis]
        onward = next_hops.get(key)
        if onward is None:
            greedy = self._torus.next_hop(self._here, target, self._mode, came_axis)
            onward = greedy if self._links.clear else self._links.onward(self._here, target, greedy)
            if onward is not None:
                next_hops[key] = onward
        return onward

    def _get_beam(self, destination: Address, packet: Buffer) -> LinkEnd | None:
        if destination.shell != GROUND_SHELL:
            return None
        at = header_start(memoryview(packet)) + _GROUND_OFFSET
        return self._ground_links.get(int.from_bytes(packet[at : at + 4], "big"))


# --- Link state ---
#
# Every satellite declares its own dead links; the time of a declaration orders the declarations of one satellite. A
# satellite is dead to the others if all its neighbours have declared their links to it down. A link that no satellite
# declares counts as up.

LIFETIME_S = 200.0
REFRESH_S = 60.0
MAX_DECLARATIONS = 360
_MOST_AHEAD_MS = 60_000

_LINKS = struct.Struct(">HBBiiQ")
_DECLARATION = struct.Struct(">IBBHQ")
_FLAG_ANSWER_ME = 0x01
_LATE_STEP_S = 0.01
_FourNeighbours = tuple[SatelliteId, SatelliteId, SatelliteId, SatelliteId]


class Declaration(NamedTuple):
    """Dead links of ``origin``, as bits in the order of ``Torus.neighbours``, and when it declared them, in Unix ms."""

    origin: SatelliteId
    down: int
    made_ms: int

    def pack(self) -> bytes:
        return _DECLARATION.pack(Address(*self.origin).pack(), self.down, 0, 0, self.made_ms)


class LinksBody(NamedTuple):
    """Body of LINKS. ``pushed`` are the operators' moves, at ``pushed_at_ms`` (0: before the start); ``late_s`` is the
    host's lateness.
    """

    answer_me: bool
    pushed: tuple[int, int]
    pushed_at_ms: int
    declarations: Sequence[Declaration] = ()
    late_s: float = 0.0

    def pack(self) -> bytes:
        return self.pack_with([declaration.pack() for declaration in self.declarations])

    def pack_with(self, records: Sequence[bytes]) -> bytes:
        if len(records) > MAX_DECLARATIONS:
            raise InvalidInput(f"{len(records)} declarations: expected {MAX_DECLARATIONS} at most")
        flags, late = _FLAG_ANSWER_ME if self.answer_me else 0, min(round(self.late_s / _LATE_STEP_S), 0xFF)
        return _LINKS.pack(len(records), flags, late, *self.pushed, self.pushed_at_ms) + b"".join(records)

    @classmethod
    def unpack(cls, body: Buffer, known: Container[bytes] = ()) -> LinksBody:
        """Parse a body, without ``known`` packed declarations."""
        if len(body) < _LINKS.size:
            raise MalformedPacket(f"LINKS of {len(body)} bytes: expected {_LINKS.size} at least")
        count, flags, late, slot_moves, plane_moves, pushed_at_ms = _LINKS.unpack_from(body)
        if count > MAX_DECLARATIONS or len(body) != _LINKS.size + count * _DECLARATION.size:
            raise MalformedPacket(f"LINKS of {count} declarations in {len(body)} bytes")
        if max(abs(slot_moves), abs(plane_moves)) > MAX_MOVES:
            raise MalformedPacket(f"{slot_moves} and {plane_moves} moves: expected {MAX_MOVES} at most")
        declarations = []
        for at in range(_LINKS.size, len(body), _DECLARATION.size):
            record = bytes(body[at : at + _DECLARATION.size])
            if record not in known:
                address, down, _, _, made_ms = _DECLARATION.unpack(record)
                origin = Address.unpack(address)
                declarations.append(Declaration(SatelliteId(origin.plane, origin.slot), down & 0xF, made_ms))
        late_s = late * _LATE_STEP_S
        return cls(bool(flags & _FLAG_ANSWER_ME), (slot_moves, plane_moves), pushed_at_ms, declarations, late_s)


class _Grid(dict[SatelliteId, _FourNeighbours]):
    def __init__(self, torus: Torus) -> None:
        self._torus = torus

    def __missing__(self, satellite: SatelliteId) -> _FourNeighbours:
        neighbours = self[satellite] = self._torus.neighbours(satellite)
        return neighbours


_grid_of = lru_cache(maxsize=16)(_Grid)


class LinkState:
    """Known state of a torus's links. Routes are shortest-path trees, regrown as a ``Throttle`` allows, but never lead
    over a link that is down here.
    """

    def __init__(self, torus: Torus) -> None:
        self._torus = torus
        self._neighbours = _grid_of(torus)
        self._declared: dict[SatelliteId, Declaration] = {}
        self._packed_declarations: dict[SatelliteId, bytes] = {}
        self.records: set[bytes] = set()
        self._down_links: set[tuple[SatelliteId, SatelliteId]] = set()
        self._trees: dict[SatelliteId, dict[SatelliteId, int]] = {}
        """Trees by satellite: the first links of shortest paths to each destination, as bits."""
        self._growth_throttle = Throttle()
        self._are_trees_stale = False
        self.trees_grown = 0
        self.satellites_searched = 0
        self.changes = 0
        self.healed = 0
        self._next_expiry_s: float | None = math.inf

    @property
    def clear(self) -> bool:
        return not self._down_links

    def declared(self) -> list[Declaration]:
        return list(self._declared.values())

    def pages(self) -> list[list[bytes]]:
        known = list(self._packed_declarations.values())
        return [known[at : at + MAX_DECLARATIONS] for at in range(0, max(1, len(known)), MAX_DECLARATIONS)]

    def packed(self, origins: Iterable[SatelliteId]) -> list[bytes]:
        return [self._packed_declarations[origin] for origin in origins if origin in self._packed_declarations]

    def made_ms(self, origin: SatelliteId) -> int:
        declaration = self._declared.get(origin)
        return declaration.made_ms if declaration is not None else 0

    def learn(self, declaration: Declaration, now_s: float, at_once: bool = False) -> bool:
        """Take a declaration. Return False if it is foreign, known, too old, or from the future.

        ``at_once``: routes from here respect it now, not when the throttle next permits.
        """
        if declaration.origin not in self._torus or declaration.made_ms <= self.made_ms(declaration.origin):
            return False
        age_ms = now_s * 1e3 - declaration.made_ms
        if not -_MOST_AHEAD_MS <= age_ms < LIFETIME_S * 1e3:
            return False
        before = self._declared.get(declaration.origin)
        self._remove_declaration(declaration.origin)
        self._declared[declaration.origin] = declaration
        self._packed_declarations[declaration.origin] = packed = declaration.pack()
        self.records.add(packed)
        self._next_expiry_s = None
        if (before.down if before is not None else 0) != declaration.down:
            self._apply_declaration(declaration.origin, now_s, at_once)
        return True

    def _remove_declaration(self, origin: SatelliteId) -> None:
        self._declared.pop(origin, None)
        self.records.discard(self._packed_declarations.pop(origin, b""))

    def expire(self, now_s: float) -> None:
        old = [origin for origin, declared in self._declared.items() if _end_s(declared) <= now_s]
        for origin in old:
            self._remove_declaration(origin)
            self._apply_declaration(origin, now_s)
        if old:
            self._next_expiry_s = None

    @property
    def next_expiry_s(self) -> float:
        if self._next_expiry_s is None:
            self._next_expiry_s = min(map(_end_s, self._declared.values()), default=math.inf)
        return self._next_expiry_s

    def is_up(self, satellite: SatelliteId, neighbour: SatelliteId) -> bool:
        return (satellite, neighbour) not in self._down_links

    def onward(self, satellite: SatelliteId, target: SatelliteId, greedy: SatelliteId) -> SatelliteId | None:
        """Return the next hop: ``greedy`` if it is on a shortest path, or if no path is known and its link is up."""
        nearer = self._get_nearer_neighbours(satellite, target)
        if nearer:
            return greedy if greedy in nearer else nearer[0]
        return greedy if self.is_up(satellite, greedy) else None

    def _get_nearer_neighbours(self, satellite: SatelliteId, target: SatelliteId) -> list[SatelliteId]:
        tree = self._trees.get(satellite)
        if tree is None:
            tree = self._grow_tree(satellite)
        links = tree.get(target, 0)
        living = self._get_living_neighbours(satellite, links)
        if links and not living:  # all links of the tree have just gone down
            living = self._get_living_neighbours(satellite, self._grow_tree(satellite).get(target, 0))
        return living

    def _get_living_neighbours(self, satellite: SatelliteId, links: int) -> list[SatelliteId]:
        four = self._neighbours[satellite]
        return [four[bit] for bit in range(4) if links >> bit & 1 and (satellite, four[bit]) not in self._down_links]

    def _grow_tree(self, root: SatelliteId) -> dict[SatelliteId, int]:
        """Return, for each reachable satellite, bits of the links from ``root`` that begin a shortest path (breadth
        first).
        """
        self.trees_grown += 1
        tree, edge = {root: 0}, [root]
        down, neighbours = self._down_links, self._neighbours
        while edge:
            reached: dict[SatelliteId, int] = {}
            for at in edge:
                links = tree[at]
                for bit, neighbour in enumerate(neighbours[at]):
                    if neighbour not in tree and (at, neighbour) not in down:
                        reached[neighbour] = reached.get(neighbour, 0) | (links or 1 << bit)
            tree.update(reached)
            edge = list(reached)
        self.satellites_searched += len(tree)
        self._trees[root] = tree
        return tree

    # --- Changes ---

    @property
    def next_growth_s(self) -> float:
        return self._growth_throttle.open_s if self._are_trees_stale else math.inf

    def discard_trees(self, now_s: float) -> None:
        """Let routes follow the last changes of links: trees are grown again when needed."""
        if self._are_trees_stale:
            self._are_trees_stale = False
            self._growth_throttle.done(now_s)
            self._trees.clear()
            self.changes += 1

    def _apply_declaration(self, origin: SatelliteId, now_s: float, at_once: bool = False) -> None:
        """Apply a declaration: a link is down if either end says so."""
        ours = self._declared_down(origin)
        for neighbour in dict.fromkeys(self._neighbours[origin]):
            ways = (origin, neighbour), (neighbour, origin)
            if neighbour in ours or origin in self._declared_down(neighbour):
                self._down_links.update(ways)
            elif ways[0] in self._down_links:
                self._down_links.difference_update(ways)
                self.healed += 1
        self._are_trees_stale = True
        self.changes += 1
        if at_once or self._growth_throttle.is_open(now_s):
            self.discard_trees(now_s)

    def _declared_down(self, origin: SatelliteId) -> list[SatelliteId]:
        declaration = self._declared.get(origin)
        if declaration is None or not declaration.down:
            return []
        return [neighbour for bit, neighbour in enumerate(self._neighbours[origin]) if declaration.down >> bit & 1]


def _end_s(declaration: Declaration) -> float:
    return declaration.made_ms / 1e3 + LIFETIME_S
