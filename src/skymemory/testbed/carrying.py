"""Upper bound of the time scale on this machine: handovers of half-full satellites must not fall behind.

Costs were measured on 95 satellites in five processes (``docs/benchmarks/sky.md``, Time scales), on a machine that
takes ``_REFERENCE_S`` for ``_work``.
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
SHARE = 0.75
_SATELLITE_S = 40e-6
_CHUNK_S = {"off": 63e-6, "on": 85e-6, "answers": 85e-6, "every": 85e-6}
"""CPU time of a chunk's handover at both ends, by authentication mode."""
_FAULTS_S = 123e-6
_DELAY_S = 18e-6
_REFERENCE_S = 1.65e-3
_TURNS = 5


def _work() -> None:
    header, sums = struct.Struct(">HHHIHI32s"), dict[bytes, int]()
    for number in range(4000):
        packet = header.pack(1, 2, 3, number, 5, 6, number.to_bytes(32, "big"))
        sums[packet[-32:]] = sums.get(packet[-32:], 0) + header.unpack(packet)[3]


def speed() -> float:
    """Return this machine's speed relative to the reference, in CPU time."""
    times_s = []
    for _ in range(_TURNS):
        started_s = time.thread_time()
        _work()
        times_s.append(time.thread_time() - started_s)
    return _REFERENCE_S / min(times_s)


def processors() -> float:
    """Return the affinity's processors, limited by the control group's quota."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else min(count, int(quota) / int(period))


def most_time_scale(plan: ConstellationPlan, processor_s_per_s: float) -> float:
    """Return the largest time scale whose moves need at most ``processor_s_per_s`` reference processors."""
    if plan.access == "onboard":
        return float("inf")
    shell, placement = shell_of(plan), sky_of(plan).placement(STRATEGY_CODES[plan.strategy], plan.servers)  # type: ignore[index]
    chunks = plan.memory_per_satellite_bytes / (plan.chunk_bytes + CHUNK_REF_BYTES) * plan.replicas * FILLED
    chunk_s = _CHUNK_S[plan.auth] + _FAULTS_S * plan.faults.any + _DELAY_S * (plan.delay_scale > 0)
    # A move costs every satellite a scan of its chunks, and the row or column that leaves the box a handover of all
    # its chunks. Rows leave at plane moves, columns at slot moves, so the shape of the box and both periods count.
    cost = 0.0
    for moves, period_s in (((1, 0), slot_move_period_s(shell)), ((0, 1), plane_move_period_s(shell))):
        leaving = len(server_moves(placement, (0, 0), (0, 0), moves)) * chunks
        cost += (plan.torus.size * _SATELLITE_S + leaving * chunk_s) / period_s
    return processor_s_per_s / cost


def check_time_scale(plan: ConstellationPlan) -> None:
    """Raise ``InvalidInput`` if the plan's moves would exceed all processors here."""
    if plan.time_scale == 0:
        return
    count = processors()
    most = most_time_scale(plan, count * speed())
    if plan.time_scale > most:
        step = 10.0 ** (math.floor(math.log10(SHARE * most)) - 1)
        memory = format_size(plan.memory_per_satellite_bytes)
        raise InvalidInput(
            f"time scale {plan.time_scale:g}: moves with half-full memories of {memory} exceed the {count:g} "
            f"processors here; use --time-scale {math.floor(SHARE * most / step) * step:g} or less, or "
            "smaller memories (`memory_per_satellite`)"
        )
