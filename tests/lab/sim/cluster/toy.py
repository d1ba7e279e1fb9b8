"""A cluster whose costs can be computed in the head."""

from __future__ import annotations

from collections.abc import Callable

from skymemory.conductor.cost_model import CostModel, Machine, Medium, ModelShape
from skymemory.conductor.picker import Picker, Ranking, Scorer, Server
from skymemory.conductor.request import PromptPlan, Request
from skymemory.conductor.scheduler import Scheduler
from skymemory_lab.sim.cluster.job import Listeners
from skymemory_lab.sim.cluster.schedulers import SchedulerFactory, World
from skymemory_lab.sim.cluster.setup import PoolSettings

TOY = CostModel(
    ModelShape("toy", layers=10, width=10, kv_heads=1, head_dim=5, attention_flops=0.0, weight_flops=1.0),
    Machine("toy", flops_per_s=1e6, memory_bytes_per_s=1e6, network_bytes_per_s=2e6),
    mfu=1.0,
)
"""1 ms a token of a prefill. A step is the longer of 1 ms + 0.2 ms a token of context, and 1 ms a request. 200 B of KV
a token, 0.1 ms a token over the network."""
QUICK = Medium("dram", 1e15)
"""Memory whose time is nothing."""
POOL = PoolSettings(dram=QUICK, network=Medium("network", 2e6), dram_bytes=200 * 512 * 100)
"""A hundred blocks a node."""

SILENT = Listeners(*[lambda *_: None] * 6)

Where = Callable[[Request], tuple[str, PromptPlan | None]]


class Scripted(Scorer):
    """Sends every request where a table says, with the plan that it says."""

    name = "scripted"

    def __init__(self, where: Where) -> None:
        self._where = where

    def rank(self, request: Request, servers: list[Server], now_s: float) -> Ranking:  # type: ignore[override]
        name, plan = self._where(request)
        scores = [float(server.name == name) for server in servers]
        plans = [plan or PromptPlan(0, 0, 0)] * len(servers)
        return Ranking(scores, matched_tokens=[0] * len(servers), plan_at=plans.__getitem__)


def scripted(prefill: Where, decode: Where = lambda request: ("decode-0", None)) -> SchedulerFactory:
    """A scheduler that follows a script."""

    def make(world: World) -> Scheduler:
        decoders = None if world.decode is None else Picker(world.decode, Scripted(decode))
        return Scheduler(Picker(world.prefill, Scripted(prefill)), decoders, world.admission)

    return make
