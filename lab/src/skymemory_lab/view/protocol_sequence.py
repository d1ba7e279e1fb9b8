"""Figures 9 and 10 of the SkyMemory paper, recorded from a run.

The state machines of flight run in virtual time on the map of figures 7 and 8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skymemory.constellation.presets import PRESETS
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.constellation.visibility import slot_move_period_s
from skymemory.placement.locate import Placement
from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES, MoveClock, SkyMap
from skymemory.protocol.wire import COMMAND_BIT, COMMAND_BYTES, TELEMETRY_BYTES, SegmentBatch, SkyHeader
from skymemory.transport.simulated import Node, SimulatedConstellation
from skymemory_lab.view.drawing import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGES,
    WIDE_IN,
    Exhibit,
    Numbers,
    draw_map,
    new_figure,
)
from skymemory_lab.view.layout_map import LayoutMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SERVERS, CHUNK_BYTES = 9, 6144
TORUS, CENTRE = Torus(5, 7), SatelliteId(2, 3)
_READ_AFTER_S = 2.0  # time from the move to the read, by which the handover has ended
_DRAWN = {"SET": "#d9822b", "ACK": GREY, "MIGRATE": GREEN, "GET": BLUE, "DATA": "#d9822b"}
_GROUND = "ground"


class SentDatagram(NamedTuple):
    sent_s: float
    arrived_s: float
    sender: Node
    receiver: Node
    operation: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Datagrams of the run. ``right`` is true if the read gave the same bytes."""

    set: tuple[SentDatagram, ...]
    move: tuple[SentDatagram, ...]
    get: tuple[SentDatagram, ...]
    move_s: float
    right: bool
    before: LayoutMap
    after: LayoutMap

    def handed_over(self) -> list[tuple[SatelliteId, SatelliteId]]:
        """Return source and target of each chunk handed over: the ends of a MIGRATE's path."""
        hops = [(datagram.sender, datagram.receiver) for datagram in self.move if datagram.operation == "MIGRATE"]
        froms, tos = {sender for sender, _ in hops}, {receiver for _, receiver in hops}
        starts = sorted(node for node in froms - tos if isinstance(node, SatelliteId))
        ends = {node.plane: node for node in tos - froms if isinstance(node, SatelliteId)}
        return [(start, ends[start.plane]) for start in starts]


class _RecordedConstellation(SimulatedConstellation):
    """Constellation that records each datagram when sent and at every hop."""

    def __init__(self, sky: SkyMap, clock: MoveClock) -> None:
        self.sent: list[SentDatagram] = []
        super().__init__(sky, SERVERS * CHUNK_BYTES, clock, self._link_s)

    def _link_s(self, sender: Node, receiver: Node) -> float:
        shell = PRESETS["starlink-a"].shell
        if isinstance(sender, SatelliteId) and isinstance(receiver, SatelliteId):
            return shell.isl_one_way_s("slot" if sender.plane == receiver.plane else "plane")
        satellite = sender if isinstance(sender, SatelliteId) else receiver
        assert isinstance(satellite, SatelliteId)
        slot_moves, plane_moves = self.clock.moves(self.now_s)
        overhead = TORUS.wrap(CENTRE.plane + plane_moves, CENTRE.slot - slot_moves)
        return shell.slant_one_way_s(*TORUS.delta(overhead, satellite), model="paper")

    def _send(self, batch: SegmentBatch, sender: Node, receiver: Node) -> None:
        arrives_s = self.now_s + self._link_s(sender, receiver)
        for data in batch.datagrams():
            header = SkyHeader.unpack(data, COMMAND_BYTES if data[0] & COMMAND_BIT else TELEMETRY_BYTES)
            self.sent.append(SentDatagram(self.now_s, arrives_s, sender, receiver, header.op.name, len(data)))
        super()._send(batch, sender, receiver)


@lru_cache(maxsize=1)
def record() -> Recording:
    """Set a block of nine chunks, let the box move by a slot, and read it."""
    period_s = slot_move_period_s(PRESETS["starlink-a"].shell)
    clock = MoveClock(slot_period_s=period_s, time_scale=1.0)
    sky = _RecordedConstellation(SkyMap(TORUS, CENTRE), clock)
    host = sky.connect(ClientConfig(1, "ideal", expected_rtt_s=0.02))
    value = bytes(range(256)) * (SERVERS * CHUNK_BYTES // 256)
    strategy = STRATEGY_CODES["rotation_hop"]
    written = host.write(hashlib.sha256(b"block").digest(), value, Striping(CHUNK_BYTES, strategy, SERVERS))
    was_set, sky.sent = tuple(sky.sent), []
    assert written.info is not None
    sky.settle(period_s + _READ_AFTER_S)
    moved, sky.sent = tuple(sky.sent), []
    read = bytearray(len(value))
    host.read(written.info, memoryview(read))
    placement = Placement.of("rotation_hop", SERVERS, TORUS, CENTRE)
    rows, columns = tuple(range(TORUS.planes)), tuple(range(TORUS.slots_per_plane))
    before, after = (LayoutMap(placement, moves, rows, columns) for moves in ((0, 0), clock.moves(sky.now_s)))
    return Recording(was_set, moved, tuple(sky.sent), period_s, bytes(read) == value, before, after)


def _numbers(*parts: tuple[str, Iterable[SentDatagram], float]) -> Numbers:
    rows = [
        (
            part,
            (datagram.sent_s - since_s) * 1e3,
            (datagram.arrived_s - since_s) * 1e3,
            label(datagram.sender),
            label(datagram.receiver),
            datagram.operation,
            datagram.size_bytes,
        )
        for part, sent, since_s in parts
        for datagram in sent
    ]
    return Numbers(("part", "sent_ms", "arrived_ms", "from", "to", "operation", "bytes"), rows)


def set_numbers() -> Numbers:
    run = record()
    return _numbers(("set", run.set, 0.0), ("rotation", run.move, run.move_s))


def get_numbers() -> Numbers:
    run = record()
    return _numbers(("get", run.get, run.move_s + _READ_AFTER_S))


def label(node: Node) -> str:
    """Format as ``(satellite, plane)``, 1-based, as the paper writes it."""
    return f"({node.slot + 1},{node.plane + 1})" if isinstance(node, SatelliteId) else _GROUND


def _lifelines(run: Recording) -> list[Node]:
    nodes = {node for datagram in (*run.set, *run.move, *run.get) for node in (datagram.sender, datagram.receiver)}
    ground = next(node for node in nodes if not isinstance(node, SatelliteId))
    return [ground, *sorted(node for node in nodes if isinstance(node, SatelliteId))]


def _sequence(
    axes: Axes, run: Recording, sent: Sequence[SentDatagram], since_s: float, layout: LayoutMap, title: str
) -> None:
    """Draw lifelines side by side, time downwards."""
    nodes = _lifelines(run)
    # A gap between planes, and after the ground.
    at: dict[Node, float] = {}
    x, before = 0.0, None
    for node in nodes:
        plane = node.plane if isinstance(node, SatelliteId) else -1
        x += 1.0 if plane == before else 1.6
        at[node], before = x, plane
    drawn = [datagram for datagram in sent if datagram.operation in _DRAWN]
    last_ms = max((datagram.arrived_s - since_s) * 1e3 for datagram in drawn)
    for node in nodes:
        axes.plot([at[node]] * 2, [0, last_ms * 1.04], color=FAINT, linewidth=0.8, zorder=0)
        server = layout.server(node) if isinstance(node, SatelliteId) else None
        words = label(node) if server is None else f"{label(node)}\n{server + 1}"
        axes.annotate(
            words,
            (at[node], 0),
            (0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7,
            linespacing=1.3,
        )
    for datagram in drawn:
        axes.annotate(
            "",
            xy=(at[datagram.receiver], (datagram.arrived_s - since_s) * 1e3),
            xytext=(at[datagram.sender], (datagram.sent_s - since_s) * 1e3),
            arrowprops={
                "arrowstyle": "-|>,head_length=0.25,head_width=0.12",
                "color": _DRAWN[datagram.operation],
                "linewidth": 0.9,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    for operation in dict.fromkeys(datagram.operation for datagram in drawn):
        axes.plot([], [], color=_DRAWN[operation], label=operation)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1.4)
    axes.set_ylim(last_ms * 1.06, 0)
    axes.set_xlim(0.4, x + 0.6)
    axes.set_ylabel("ms")
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_title(title, pad=24)


def _chunks(axes: Axes, title: str, layout: LayoutMap) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0, 0), SERVERS, 0.9, facecolor=ORANGES[3], edgecolor=INK, linewidth=0.8))
    axes.text(SERVERS / 2, 0.45, f"block: {SERVERS * CHUNK_BYTES:,} bytes", ha="center", va="center", fontsize=7.5)
    names = ("chunk", "server", "satellite")
    for row, name in enumerate(names):
        axes.text(-0.3, 1.95 + row, name, ha="right", va="center", fontsize=7.5)
    for server in range(SERVERS):
        satellite = layout.placement.locate(server, (0, 0), layout.now_moves)
        axes.add_patch(Rectangle((server, 1.5), 1, 0.9, facecolor=ORANGES[4], edgecolor=INK, linewidth=0.6))
        for row, text in enumerate((str(server + 1), str(server + 1), f"{satellite.slot + 1},{satellite.plane + 1}")):
            axes.text(server + 0.5, 1.95 + row, text, ha="center", va="center", fontsize=7.5)
    axes.set_xlim(-2.4, SERVERS + 0.1)
    axes.set_ylim(4.5, -0.2)
    axes.axis("off")
    axes.set_title(title)


def draw_set() -> Figure:
    """Draw figure 9: a block is set on its satellites, and handed over."""
    run = record()
    figure = new_figure(WIDE_IN, 7.6)
    grid = figure.add_gridspec(3, 2, height_ratios=(1.35, 1.5, 2.0))
    chunk_axes, right = (figure.add_subplot(grid[0, column]) for column in range(2))
    _chunks(chunk_axes, "(a) chunk c is on server (c − 1) mod 9 + 1", run.before)
    draw_map(right, run.after, number_size=7.5)
    right.set_title("(b) after one rotation")
    middle, below = (figure.add_subplot(grid[row, :]) for row in (1, 2))
    words = "satellites are (satellite, plane), their server below"
    _sequence(middle, run, run.set, 0.0, run.before, f"(c) set: {words}")
    minutes = run.move_s / 60
    _sequence(
        below, run, run.move, run.move_s, run.after, f"(d) {minutes:.1f} minutes later: handover within each plane"
    )
    figure.suptitle("Figure 9. Setting a block, and one rotation, as recorded from a run", color=INK)
    return figure


def draw_get() -> Figure:
    run = record()
    figure = new_figure(WIDE_IN, 5.0)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.35, 1.9))
    map_axes, right = (figure.add_subplot(grid[0, column]) for column in range(2))
    draw_map(map_axes, run.after, number_size=7.5)
    map_axes.set_title("(a) located from the clock: one rotation since the set")
    below = figure.add_subplot(grid[1, :])
    _sequence(
        below, run, run.get, run.move_s + _READ_AFTER_S, run.after, "(c) get: all servers at once, the farthest decides"
    )
    _chunks(right, "(b) the block is joined from its chunks", run.after)
    figure.suptitle("Figure 10. Getting the block after one rotation, as recorded from a run", color=INK)
    return figure


SEQUENCES: dict[int, Exhibit] = {
    9: Exhibit("figure-09", "Figure 9. Setting a block, and one rotation", draw_set, set_numbers),
    10: Exhibit("figure-10", "Figure 10. Getting a block after one rotation", draw_get, get_numbers),
}
