"""Reads and writes of the satellite and client machines in virtual time, beside the physical model and its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from skymemory.constellation.links import Links
from skymemory.constellation.presets import preset_named
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed.connect import clock_of
from skymemory.testbed.plan import ConstellationPlan
from skymemory.testbed.virtual import VirtualConstellation
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.physical import (
    OPERATIONS,
    LinkRates,
    Operation,
    Order,
    TransferSetting,
    Ways,
    latency_s,
    ways_of,
)


class Compared(NamedTuple):
    """One transfer: by the machines, by the model, and the least it can take; seconds."""

    operation: Operation
    machines_s: float
    model_s: float
    bound_s: float


BUFFER_BYTES = 256 << 20
"""Of each direction of a link: as the model and the bound, which know of no full buffer."""


def virtual(plan: ConstellationPlan, rates: LinkRates) -> VirtualConstellation:
    """The plan's machines over links with these rates, whose buffers never fill."""
    if rates == LinkRates():
        return VirtualConstellation(plan)
    links = Links(rates.up_bit_s, rates.down_bit_s, rates.isl_bit_s, buffer_bytes=BUFFER_BYTES)
    return VirtualConstellation(replace(plan, links=links))


def ways_now(plan: ConstellationPlan, now_s: float, access: str) -> Ways:
    """As the plan's clients see them."""
    preset = preset_named(plan.preset)
    sky_s = clock_of(plan).sky_s(now_s)
    sight = plan.ground.sight(preset)
    return ways_of(preset, sight, access, [sky_s], strategy=plan.strategy, servers=plan.servers)  # type: ignore[arg-type]


def compare(
    plan: ConstellationPlan, value_bytes: int, rates: LinkRates | None = None, order: Order = "farthest"
) -> list[Compared]:
    """A write, then a read of it, without loss, by a client that is connected already."""
    rates = rates or LinkRates()
    sky = virtual(plan, rates)
    host = sky.connect()
    data, out = np.random.default_rng(value_bytes).bytes(value_bytes), bytearray(value_bytes)
    found = []
    for operation in reversed(OPERATIONS):
        began_s = sky.simulated.now_s
        ways = ways_now(plan, began_s, plan.access)
        setting = TransferSetting(value_bytes, plan.chunk_bytes, order=order)
        if operation == "set":
            code = STRATEGY_CODES[plan.strategy]  # type: ignore[index]
            ended = host.write(b"v" * 32, data, Striping(plan.chunk_bytes, code, plan.servers))
            info = ended.info
        else:
            ended = host.read(info, memoryview(out))
            assert out == data
        assert ended.ok, ended.report
        took_s = sky.simulated.now_s - began_s
        model_s, bound_s = (float(f(ways, setting, rates, operation)[0]) for f in (latency_s, lower_bound_s))
        found.append(Compared(operation, took_s, model_s, bound_s))
    return found
