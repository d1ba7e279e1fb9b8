"""Latency of a get or a set by physics: light, link rates, first-in-first-out queues, servers that take their time.

``ways_of`` derives each server's path from the geometry; ``latency_s`` then moves a value, for many times at once.

- A get asks each server once; a server answers chunk after chunk, each after ``server_s``. Links store and forward.
- A set sends chunks in bursts, server after server (or the farthest first); each server acknowledges its last chunk.
- Through a gateway all packets share its beam and four links. In a tree of equally fast links the root's queue is the
  longest, so only roots are computed.

Exact for separate beams, and for shared links if servers take no time, no window binds and inter-satellite links are
not slower than the beam. Otherwise merging chunks are a fluid (error at most a chunk's transmission per server), of two
queues the larger counts (at most 2 % too short in 240 random cases), and a binding window passes once per mean round
trip (error 3 % in the median of 240 cases, 36 % in the worst).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from skymemory.constellation.presets import Preset
from skymemory.constellation.sight import BoxSight, OrbitSight, Sight
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import InvalidInput
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Moves, Placement
from skymemory.protocol.client.gateway import Access, access_named
from skymemory.protocol.client.transfer import WRITE_BURST_CHUNKS
from skymemory.testbed.plan import PlaceSight
from skymemory.units import SPEED_OF_LIGHT_M_S

Operation = Literal["get", "set"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
Order = Literal["in_turn", "farthest"]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Array = TypeVar("Array", Floats, Integers)

_UDP_BYTES = 28
REQUEST_BYTES, DATA_BYTES, SET_BYTES, ACK_BYTES = 97 + _UDP_BYTES, 132 + _UDP_BYTES, 124 + _UDP_BYTES, 105 + _UDP_BYTES
"""Packet bytes with UDP and IPv4: a GET, the overhead of a DATA and a SET, an ACK."""
# Values of ``out_link`` and ``in_link``: a server with its own beam; the gateway.
_OWN, _AT_GATEWAY = -2, -1
LINKS = 4


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Bits per second, in each direction; None: no limit."""

    up_bit_s: float | None = None
    down_bit_s: float | None = None
    isl_bit_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("up_bit_s", "down_bit_s", "isl_bit_s"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise InvalidInput(f"{name} {rate:g}: expected bits per second, more than 0, or None for no limit")


@dataclass(frozen=True, slots=True)
class TransferSetting:
    value_bytes: int
    chunk_bytes: int = 6144
    server_s: float = 0.0  # a server's time per chunk
    window_bytes: int | None = None  # bytes in flight: of a get in total, of a set on each beam
    order: Order = "in_turn"  # in which a set serves the servers

    def __post_init__(self) -> None:
        if self.value_bytes < 1:
            raise InvalidInput(f"a value of {self.value_bytes} bytes: expected at least 1, an empty one moves nothing")
        if self.chunk_bytes < 1:
            raise InvalidInput(f"chunks of {self.chunk_bytes} bytes: expected at least 1")
        if not 0 <= self.server_s < math.inf:
            raise InvalidInput(f"server time {self.server_s:g} s: expected 0 or more")
        if self.window_bytes is not None and self.window_bytes < self.chunk_bytes:
            raise InvalidInput(
                f"a window of {self.window_bytes} bytes for chunks of {self.chunk_bytes}: expected at least one chunk"
            )

    @property
    def chunks(self) -> int:
        return -(-self.value_bytes // self.chunk_bytes)

    def counts(self, servers: int) -> Integers:
        per_server, more = divmod(self.chunks, servers)
        chunks: Integers = per_server + (np.arange(servers) < more).astype(np.int64)
        return chunks[chunks > 0]

    @property
    def window_chunks(self) -> float:
        return math.inf if self.window_bytes is None else self.window_bytes // self.chunk_bytes


@dataclass(frozen=True, slots=True)
class Ways:
    """Paths from a host to each server: arrays of times × servers."""

    access: Access
    times_s: Floats
    """Seconds after the epoch at which something is in sight."""
    one_way_s: Floats
    """Half the round trip, whose way back may take other links."""
    hops: Integers  # inter-satellite links; 0 for the gateway and over an own beam
    out_link: Integers
    in_link: Integers
    """The gateway's link out and back: 0 to 3 as its neighbours, −1 the gateway, −2 an own beam."""
    seen_share: float = 1.0  # share of the times asked for at which something is in sight
    least_one_way_s: Floats | None = None
    """Light time over the quickest links, for the lower bound."""

    @property
    def servers(self) -> int:
        return int(self.one_way_s.shape[1])

    @property
    def shared(self) -> Booleans:
        return np.asarray(self.out_link != _OWN)

    def of(self, chosen: slice | Booleans) -> Ways:
        names = ["times_s", "one_way_s", "hops", "out_link", "in_link"]
        names += ["least_one_way_s"] if self.least_one_way_s is not None else []
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


def sight_of(preset: Preset, mask_deg: float, rule: Literal["nearest", "climbing"] = "nearest") -> Sight:
    if preset.fixed_centre is not None:
        return BoxSight(preset.shell, preset.torus, mask_deg)
    return OrbitSight(preset.shell, preset.host, preset.epoch_unix_s, mask_deg, rule, preset.torus.gaps)


def ways_of(
    preset: Preset,
    sight: Sight,
    access: Access,
    times_s: Sequence[float],
    *,
    strategy: Strategy | None = None,
    servers: int | None = None,
    exact_links: bool = False,
    moves_by_time: Sequence[tuple[Moves, Moves]] | None = None,
) -> Ways:
    """Return the ways to a value stored at each of these times (seconds after the epoch).

    Args:
        sight: that of the host; a ``PlaceSight`` sees the box of another host.
        times_s: those with nothing in sight are left out.
        strategy: None: ``hop`` on board, else the preset's.
        exact_links: links have their length at each time, else links between planes have their maximum.
        moves_by_time: per time, the moves at the set and those that the holders count; None: by the clock.

    Raises:
        InvalidInput: an unknown access, more servers than satellites, or nothing ever in sight.
    """
    access = access_named(access)
    if not len(times_s):
        raise InvalidInput("no times: expected at least one, in seconds after the epoch")
    over = sight.box if isinstance(sight, PlaceSight) else sight
    track = over.track if isinstance(over, OrbitSight) and access != "onboard" else None
    centre = preset.centre if track is None else preset.torus.wrap(*track.cell_at(0.0))
    slot_s, plane_s = preset.shell.isl_one_way_s("slot"), preset.shell.isl_one_way_s("plane")
    placement_strategy = strategy or ("hop" if access == "onboard" else preset.strategy)
    wanted = preset.servers if servers is None else servers
    placement = Placement.of(placement_strategy, wanted, preset.torus, centre, slot_s, plane_s)
    own_orbits = preset.shell.torus.cells == preset.torus.cells
    paths = _Paths(preset, sight, access, exact_links and own_orbits)
    rows = []
    for at, time_s in enumerate(map(float, times_s)):
        moves = (0, 0) if track is None else track.moves(time_s)
        set_moves, moves = (moves, moves) if moves_by_time is None else moves_by_time[at]
        centre_now = placement.centre_at(moves)
        visible = (
            (preset.torus.living(centre_now),) if access in ("onboard", "ideal") else sight.in_sight(centre_now, time_s)
        )
        if visible:
            servers_now = placement.locate_all(set_moves, moves)
            rows.append((time_s, *paths.row(servers_now, centre_now, visible, time_s)))
    if not rows:
        host = preset.host
        raise InvalidInput(
            f"no satellite of {preset.name} is in sight of {host.latitude_deg:g}, {host.longitude_deg:g} at any of "
            f"{len(times_s)} times: expected a place nearer to its orbits ({preset.shell.inclination_deg:g}° north or "
            "south at most, and some degrees), or a lower elevation mask"
        )
    times, one_way_s, hops, out_link, in_link, least_s = (np.array(column) for column in zip(*rows, strict=True))
    return Ways(access, times, one_way_s, hops, out_link, in_link, len(rows) / len(times_s), least_s)


class _Path(NamedTuple):
    """Path there and back, in satellite indices; seconds with the longest links."""

    nodes: list[int]
    hops: int
    out_link: int
    in_link: int
    round_trip_s: float


class _Paths:
    """Cached paths over inter-satellite links; ``exact``: with the links' lengths at each time."""

    def __init__(self, preset: Preset, sight: Sight, access: Access, exact: bool) -> None:
        self._sight, self._access = sight, access
        self._torus, self._shell, self._exact = preset.torus, preset.shell, exact
        self._known: dict[tuple[SatelliteId, SatelliteId], _Path] = {}
        self._least_s: dict[tuple[SatelliteId, SatelliteId], float] = {}
        self._hops_s: dict[tuple[SatelliteId, SatelliteId], float] = {}

    def row(
        self, servers: tuple[SatelliteId, ...], centre: SatelliteId, visible: tuple[SatelliteId, ...], time_s: float
    ) -> tuple[Floats, Integers, Integers, Integers, Floats]:
        """Return a row of ``Ways`` at ``time_s``, from ``visible`` satellites, of which the first is the gateway."""
        sight, access, gateway = self._sight, self._access, visible[0]
        direct = set(servers) if access == "ideal" else set(visible) - {gateway} if access == "hybrid" else set()
        one_way_s, hops, out_link, in_link = self.from_gateway(gateway, servers, time_s)
        least_s = self.least_s(gateway, servers, one_way_s)
        if access != "onboard":
            beam_s = sight.one_way_s(gateway, centre, time_s)
            one_way_s, least_s = one_way_s + beam_s, least_s + beam_s
        for at, satellite in enumerate(servers):
            if satellite in direct:
                one_way_s[at] = least_s[at] = sight.one_way_s(satellite, centre, time_s)
                hops[at], out_link[at], in_link[at] = 0, _OWN, _OWN
        return one_way_s, hops, out_link, in_link, least_s

    def _path(self, source: SatelliteId, target: SatelliteId) -> _Path:
        path = self._known.get((source, target))
        if path is None:
            out, back = self._torus.path(source, target), self._torus.path(target, source)
            neighbours = self._torus.neighbours(source)
            at_it = len(out) == 1
            way = out + back[1:]
            path = self._known[source, target] = _Path(
                [self._torus.index(satellite) for satellite in way],
                len(out) - 1,
                _AT_GATEWAY if at_it else neighbours.index(out[1]),
                _AT_GATEWAY if at_it else neighbours.index(back[-2]),
                sum(self._hop_s(*link) for link in pairwise(way)),
            )
        return path

    def least_s(self, gateway: SatelliteId, servers: tuple[SatelliteId, ...], routed_s: Floats) -> Floats:
        """Return the light times over the quickest links; with exact links, those of the routes."""
        if self._exact:
            return routed_s.copy()
        if any((gateway, server) not in self._least_s for server in servers):
            self._search(gateway, set(servers))
        return np.array([self._least_s[gateway, server] for server in servers])

    def _search(self, gateway: SatelliteId, wanted: set[SatelliteId]) -> None:
        # Dijkstra's algorithm over light times.
        edge, settled = [(0.0, gateway)], set[SatelliteId]()
        while edge and not wanted <= settled:
            light_s, satellite = heapq.heappop(edge)
            if satellite in settled:
                continue
            settled.add(satellite)
            self._least_s[gateway, satellite] = light_s
            for neighbour in self._torus.neighbours(satellite):
                if neighbour not in settled:
                    heapq.heappush(edge, (light_s + self._hop_s(satellite, neighbour), neighbour))

    def _hop_s(self, source: SatelliteId, target: SatelliteId) -> float:
        hop_s = self._hops_s.get((source, target))
        if hop_s is None:
            hop_s = self._hops_s[source, target] = self._shell.hop_one_way_s(self._torus, source, target)
        return hop_s

    def from_gateway(
        self, gateway: SatelliteId, servers: tuple[SatelliteId, ...], time_s: float
    ) -> tuple[Floats, Integers, Integers, Integers]:
        # Return one-way seconds, hops, and the gateway's link out and back, for each server.
        paths = [self._path(gateway, server) for server in servers]
        hops, out_link, in_link = (np.array(part) for part in zip(*(path[1:4] for path in paths), strict=True))
        if not self._exact:
            return np.array([path.round_trip_s / 2 for path in paths]), hops, out_link, in_link
        nodes = np.concatenate([path.nodes for path in paths])
        positions = self._shell.positions_m(time_s).reshape(-1, 3)[nodes]
        starts = np.concatenate([[0], np.cumsum(2 * hops + 1)[:-1]])
        steps_m = np.linalg.norm(np.diff(positions, axis=0, prepend=positions[:1]), axis=1)
        steps_m[starts] = 0.0  # the step from the end of a path to the start of the next path
        return np.add.reduceat(steps_m, starts) / (2 * SPEED_OF_LIGHT_M_S), hops, out_link, in_link


def latency_s(ways: Ways, setting: TransferSetting, rates: LinkRates, operation: Operation = "get") -> Floats:
    """Return the seconds until a get's last chunk, or a set's last acknowledgement, at each time."""
    if operation not in OPERATIONS:
        raise InvalidInput(f"operation {operation!r}: expected get or set")
    counts = setting.counts(ways.servers)
    used = _Used(ways, len(counts), setting, counts)
    return _get_s(used, rates) if operation == "get" else _set_s(used, rates)


class _Used:
    """Ways to the ``used`` servers that have chunks, and the chunks' ``counts``."""

    def __init__(self, ways: Ways, used: int, setting: TransferSetting, counts: Integers) -> None:
        self.setting, self.counts, self.onboard = setting, counts, ways.access == "onboard"
        self.one_way_s, self.hops = ways.one_way_s[:, :used], ways.hops[:, :used]
        self.out_link, self.in_link = ways.out_link[:, :used], ways.in_link[:, :used]
        self.shared = self.out_link != _OWN
        self.any_own, self.any_shared = not self.shared.all(), bool(self.shared.any())

    def span_s(self, each_s: Floats | float, cycle_s: Floats) -> Floats:
        """Return the time from each server's first chunk to its last, ``each_s`` apart.

        The window, which each server has, passes once per ``cycle_s``, a chunk's round trip.
        """
        window = np.minimum(self.counts, self.setting.window_chunks)
        rounds, place = np.divmod(self.counts - 1, window)
        if not rounds.any():
            return np.asarray(place * each_s)
        return np.asarray(rounds * np.maximum(cycle_s, window * each_s) + place * each_s)

    def stretched_s(self, cycle_s: Floats, among: Booleans | None = None) -> Floats | float:
        """Return the time from the first chunk to the last, if all servers share a window.

        It passes once per mean ``cycle_s``, a chunk's round trip.
        """
        server_chunks = self.counts if among is None else self.counts * among
        chunks, window = server_chunks.sum(axis=-1, keepdims=True), self.setting.window_chunks
        if (chunks <= window).all():
            return 0.0
        mean_s = (server_chunks * cycle_s).sum(axis=1, keepdims=True) / np.maximum(chunks, 1)
        return np.asarray(np.maximum(chunks - window, 0) / window * mean_s)


def _seconds(size_bytes: float, rate_bit_s: float | None) -> float:
    return 0.0 if rate_bit_s is None else size_bytes * 8 / rate_bit_s


def _get_s(used: _Used, rates: LinkRates) -> Floats:
    # Return the seconds of a get: requests out, chunks back over links, then over own or shared beams.
    setting, hops, tau_s = used.setting, used.hops, used.setting.server_s
    ask_s, ask_isl_s = _seconds(REQUEST_BYTES, rates.up_bit_s), _seconds(REQUEST_BYTES, rates.isl_bit_s)
    down_s = _seconds(setting.chunk_bytes + DATA_BYTES, rates.down_bit_s)
    isl_s = _seconds(setting.chunk_bytes + DATA_BYTES, rates.isl_bit_s)
    if used.onboard:
        # No beam: the requests queue at the host's links; their first hop is included in the hops.
        sent_s = (_rank_by_link(used.out_link) - 1) * ask_isl_s
        ask_s = down_s = 0.0
    else:
        sent_s = np.where(used.shared, np.cumsum(used.shared, axis=1), 1) * ask_s
    way_s = 2 * used.one_way_s + hops * (ask_isl_s + isl_s) + tau_s
    first_s = sent_s + way_s
    cycle_s = ask_s + way_s + down_s
    stretched_s = used.stretched_s(cycle_s)
    ends = []
    if used.any_own:
        own_s = first_s + np.maximum((used.counts - 1) * max(tau_s, down_s), stretched_s) + down_s
        ends.append(np.where(used.shared, -np.inf, own_s).max(axis=1))
    if used.any_shared:
        each_s = np.where(hops > 0, isl_s, tau_s) if isl_s > tau_s else tau_s
        last_s = first_s + np.maximum((used.counts - 1) * each_s, stretched_s)
        ends.append(_root_s(used.in_link, first_s, last_s, used.counts, isl_s, down_s))
    return np.asarray(np.maximum.reduce(ends))


def _rank_by_link(link: Integers) -> Integers:
    # Return each server's position, from 1, among the servers on its link.
    rank = np.ones_like(link)
    for link_number in range(LINKS):
        on_it = link == link_number
        rank = np.where(on_it, np.cumsum(on_it, axis=1), rank)
    return rank


def _root_s(link: Integers, first_s: Floats, last_s: Floats, counts: Integers, isl_s: float, beam_s: float) -> Floats:
    """Return when the last packet has passed the gateway's links and its beam."""
    merged = _Merged(link, first_s, last_s, counts)
    end_s = merged.end_s(None, beam_s)
    if isl_s > beam_s:  # otherwise a link's queue is never longer than the beam's queue would be without it
        for link_number in range(LINKS):
            # Arrivals have passed the link once already.
            end_s = np.maximum(end_s, merged.end_s(link_number, isl_s) - isl_s + beam_s)
    return end_s


class _Merged:
    """Streams of packets, sorted by their first and last moments; packets in between are spread evenly."""

    def __init__(self, link: Integers, first_s: Floats, last_s: Floats, counts: Integers) -> None:
        length_s = last_s - first_s
        even = length_s > 0
        if even.any():
            slope = np.where(even, (counts - 2.0) / np.where(even, length_s, 1.0), 0.0)
            moments_s = np.concatenate([first_s, last_s], axis=1)
            jumps = np.concatenate([np.where(even, 1.0, counts), even], axis=1)
            link = np.concatenate([link, link], axis=1)
        else:
            moments_s, jumps = first_s, np.broadcast_to(counts.astype(np.float64), first_s.shape)
        # Rows are sorted once for all links. One flat index is faster than an index per axis.
        order = np.argsort(moments_s, axis=1)
        order += np.arange(len(order))[:, None] * order.shape[1]
        self._moments_s, self._jumps, self._link = (
            np.ascontiguousarray(part).ravel()[order] for part in (moments_s, jumps, link)
        )
        self._fluid = None
        if even.any():
            self._fluid = np.concatenate([slope, -slope], axis=1).ravel()[order]
            self._step_s = np.diff(self._moments_s, axis=1)

    def end_s(self, link: int | None, each_s: float) -> Floats:
        """Return when a queue with ``each_s`` per packet has served all arrivals by this link (None: all shared).

        It is the largest sum, over all moments, of the moment and the service of all later or simultaneous arrivals.
        """
        among = self._link != _OWN if link is None else self._link == link
        if each_s == 0.0:
            return np.asarray(np.where(among & (self._jumps > 0), self._moments_s, -np.inf).max(axis=1))
        after = self._jumps * among
        if self._fluid is not None:
            flowing = np.cumsum(self._fluid * among, axis=1)
            after[:, :-1] += np.maximum(flowing[:, :-1], 0.0) * self._step_s
        after = np.cumsum(after[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(np.where(after > 0, self._moments_s + each_s * after, -np.inf).max(axis=1))


def _set_s(used: _Used, rates: LinkRates) -> Floats:
    # Return the seconds of a set, to its last acknowledgement.
    setting, hops, tau_s, counts = used.setting, used.hops, used.setting.server_s, used.counts
    up_s = 0.0 if used.onboard else _seconds(setting.chunk_bytes + SET_BYTES, rates.up_bit_s)
    isl_s = _seconds(setting.chunk_bytes + SET_BYTES, rates.isl_bit_s)
    ack_s = 0.0 if used.onboard else _seconds(ACK_BYTES, rates.down_bit_s)
    ack_isl_s = _seconds(ACK_BYTES, rates.isl_bit_s)
    # A chunk that is sent first; the next chunk starts after its acknowledgement.
    alone_s = up_s + used.one_way_s + hops * isl_s + tau_s
    cycle_s = alone_s + used.one_way_s + hops * ack_isl_s + ack_s
    ends = []
    if used.any_own:
        own_s = cycle_s + used.span_s(max(tau_s, up_s), cycle_s)
        ends.append(np.where(used.shared, -np.inf, own_s).max(axis=1))
    if used.any_shared:
        first_s, last_s = _delivered_s(used, up_s, isl_s)
        done_s = np.maximum(last_s + tau_s, first_s + counts * tau_s)
        if setting.window_bytes is not None:
            done_s = np.maximum(done_s, alone_s + used.stretched_s(cycle_s, used.shared))
        back_s = done_s + used.one_way_s + hops * ack_isl_s
        ends.append(_root_s(used.in_link, back_s, back_s, np.ones_like(counts), ack_isl_s, ack_s))
    return np.asarray(np.maximum.reduce(ends))


def _delivered_s(used: _Used, up_s: float, isl_s: float) -> tuple[Floats, Floats]:
    # Return when each server's first and last chunk arrive, with a chunk's seconds on the beam and on a link.
    sending = _Sending(used)
    first, last = sending.places(used.shared)
    first_s = np.asarray((first + 1) * up_s, dtype=np.float64)  # at the gateway, without the beam's light time
    last_s = np.asarray((last + 1) * up_s, dtype=np.float64)
    if isl_s > up_s:
        for link_number in range(LINKS):
            on_it = used.out_link == link_number
            if not on_it.any():
                continue
            first, last = sending.places(on_it)
            # The k-th packet leaves a queue at the largest sum, over the earlier packets, of arrival and services since
            # then.
            started_s = sending.latest(np.where(on_it, first_s - first * isl_s, -np.inf))
            first_s = np.where(on_it, started_s + first * isl_s, first_s)
            last_s = np.where(on_it, np.maximum(last_s, started_s + last * isl_s), last_s)
    way_s = used.one_way_s + used.hops * isl_s
    return first_s + way_s, last_s + way_s


class _Sending:
    """Order of a set's chunks: bursts of each server in turn, or all chunks of the farthest first."""

    def __init__(self, used: _Used) -> None:
        self._counts = used.counts
        self._order: Integers | None = None
        self._burst = WRITE_BURST_CHUNKS
        if used.setting.order == "farthest":
            self._burst = int(used.counts.max())
            self._order = np.argsort(-used.one_way_s, axis=1, kind="stable")
            self._back = np.argsort(self._order, axis=1, kind="stable")

    def places(self, among: Booleans) -> tuple[Integers, Integers]:
        # Return the positions, from 0, of each server's first and last chunk among those of the servers ``among``.
        counts, burst = self._counts, self._burst
        first = self._before(among, np.minimum(counts, burst))
        if counts[0] <= burst:
            return first, first + counts - 1
        last = np.zeros_like(first)
        for chunks in np.unique(counts):  # two numbers at most
            rounds = (chunks - 1) // burst
            complete = (among * np.minimum(counts, rounds * burst)).sum(axis=1, keepdims=True)
            before = self._before(among, np.clip(counts - rounds * burst, 0, burst))
            last = np.where(counts == chunks, complete + before + chunks - 1 - rounds * burst, last)
        return first, last

    def _before(self, among: Booleans, sent: Integers) -> Integers:
        in_order = self._sent(among * sent)
        return self._unsent(np.cumsum(in_order, axis=1) - in_order)

    def latest(self, values: Floats) -> Floats:
        # Return the running maximum in the order of sending.
        return self._unsent(np.maximum.accumulate(self._sent(values), axis=1))

    def _sent(self, values: Array) -> Array:
        return values if self._order is None else np.take_along_axis(values, self._order, axis=1)

    def _unsent(self, values: Array) -> Array:
        return values if self._order is None else np.take_along_axis(values, self._back, axis=1)
