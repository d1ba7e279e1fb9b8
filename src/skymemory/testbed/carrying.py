"""How fast a constellation's clock may run on this machine: what its moves cost, and the processors there are.

When the box moves, satellites hand their chunks over. A clock that runs faster than they can do it leaves ever more
behind, so the time scale is bounded by what satellites half full would have to carry. Measured on 95 satellites
in five processes (``docs/benchmarks/sky.md``, Time scales), on a machine on which ``_work`` takes ``_REFERENCE_S``.
"""

from __future__ import annotations

import math
import os
import struct
import time
from pathlib import Path

from skymemory.constellation.visibility import plane_move_period_s, slot_move_period_s
from skymemory.errors import InvalidInput
from skymemory.placement.locate import server_moves
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.wire import CHUNK_REF_BYTES
from skymemory.testbed.connect import shell_of, sky_of
from skymemory.testbed.plan import ConstellationPlan
from skymemory.units import format_size

FILLED = 0.5
"""How full the satellites of the box are taken to be. Beyond that chunks stay behind for a while, and answer there."""
SHARE = 0.75
"""Of the processors, for the scale that is named: the rest is for answers, and for other programs."""
_SATELLITE_S = 40e-6
"""What a move costs each satellite, whatever it holds."""
_CHUNK_S = {"off": 63e-6, "on": 85e-6, "every": 85e-6}
"""To hand a chunk over: both ends, by what is authenticated."""
_FAULTS_S = 123e-6
"""More for each chunk where faults are injected: datagrams go one by one."""
_DELAY_S = 18e-6
"""More for each where links are as slow as light."""
_REFERENCE_S = 1.65e-3
_TURNS = 5


def _work() -> None:
    """What hosts do all day: headers packed, looked up and taken apart."""
    header, seen = struct.Struct(">HHHIHI32s"), dict[bytes, int]()
    for number in range(4000):
        packet = header.pack(1, 2, 3, number, 5, 6, number.to_bytes(32, "big"))
        seen[packet[-32:]] = seen.get(packet[-32:], 0) + header.unpack(packet)[3]


def speed() -> float:
    """This machine's, of the one that the costs were measured on: the best of some turns, in processor time, so that
    other programs do not count.
    """
    times_s = []
    for _ in range(_TURNS):
        began_s = time.thread_time()
        _work()
        times_s.append(time.thread_time() - began_s)
    return _REFERENCE_S / min(times_s)


def processors() -> float:
    """So many this process may use: those it is bound to, and no more than its control group's quota."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else min(count, int(quota) / int(period))


def most_time_scale(plan: ConstellationPlan, processor_s_per_s: float) -> float:
    """The fastest clock whose moves cost at most so many of the reference machine's processors."""
    if plan.access == "onboard":
        return float("inf")
    shell, placement = shell_of(plan), sky_of(plan).placement(STRATEGY_CODES[plan.strategy], plan.servers)  # type: ignore[index]
    chunks = plan.memory_per_satellite_bytes / (plan.chunk_bytes + CHUNK_REF_BYTES) * plan.replicas * FILLED
    chunk_s = _CHUNK_S[plan.auth] + _FAULTS_S * plan.faults.any + _DELAY_S * (plan.delay_scale > 0)
    cost = 0.0
    for moves, period_s in (((1, 0), slot_move_period_s(shell)), ((0, 1), plane_move_period_s(shell))):
        leaving = len(server_moves(placement, (0, 0), (0, 0), moves)) * chunks
        cost += (plan.torus.size * _SATELLITE_S + leaving * chunk_s) / period_s
    return processor_s_per_s / cost


def check_time_scale(plan: ConstellationPlan) -> None:
    """Raise ``InvalidInput`` for a plan whose moves would take more than all processors of this machine."""
    if plan.time_scale == 0:
        return
    count = processors()
    most = most_time_scale(plan, count * speed())
    if plan.time_scale > most:
        step = 10.0 ** (math.floor(math.log10(SHARE * most)) - 1)
        memory = format_size(plan.memory_per_satellite_bytes)
        raise InvalidInput(
            f"time scale {plan.time_scale:g}: with memories of {memory} half full its moves are more than {count:g} "
            f"processors here can do; choose --time-scale {math.floor(SHARE * most / step) * step:g} or less, or "
            "a smaller --memory-per-satellite"
        )
