"""Routers that exchange what they have sent place requests nearly as one router does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from skymemory.conductor.picker import Picker
from skymemory_lab.sim.replica_exchange import ReplicaExchange, sharing_strategy
from skymemory_lab.sim.routing import RoutingSetup, as_routed, measured, simulate
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import TENANTS, generate

DURATION_S = 200.0
OUTAGE = (120.0, 150.0)


def tenants(load: float, seed: int) -> list[TraceRequest]:
    rate = TENANTS.conversations_per_s * load
    return generate(replace(TENANTS, conversations_per_s=rate), DURATION_S, seed=seed)


def mean_s(requests: Sequence[TraceRequest], exchange: ReplicaExchange | None = None, **how: object) -> float:
    setup = replace(RoutingSetup(usage=True, seed=1), **how)  # type: ignore[arg-type]
    scorers = [sharing_strategy("least-ttft", setup.server_names) for _ in range(setup.routers)]
    prompts = [as_routed(request) for request in requests]
    outcomes = simulate(requests, scorers, setup, prompts=prompts, exchange=exchange)
    return measured(outcomes, setup.servers, DURATION_S / 2).mean_s


@pytest.mark.brief()
@pytest.mark.parametrize(("load", "most"), [(0.6, 1.15), (1.0, 1.3)])
def test_four_routers_are_nearly_as_fast_as_one(load: float, most: float) -> None:
    requests = tenants(load, 1)
    one_s = mean_s(requests)
    assert mean_s(requests, ReplicaExchange(), routers=4, exchange_s=0.1) < most * one_s
    dice = random.Random(1)
    lossy = ReplicaExchange(lambda sender, receiver: dice.random() < 0.2)
    assert mean_s(requests, lossy, routers=4, exchange_s=0.1) < most * one_s
    assert sum(state.elsewhere.gaps for state in lossy.states) > 100
    assert mean_s(requests, routers=4) > 1.7 * one_s, "separate routers"


@pytest.mark.brief()
def test_an_outage_costs_no_more_than_its_time() -> None:
    requests = tenants(0.6, 1)
    one_s, separate_s = mean_s(requests), mean_s(requests, routers=4)
    with_outage_s = mean_s(requests, ReplicaExchange(), routers=4, exchange_s=0.1, outage=OUTAGE)
    assert with_outage_s < one_s + 0.5 * (separate_s - one_s)


class Watched(ReplicaExchange):
    """Compares, at each exchange, what each replica believes of the others with the truth."""

    def connect(self, pickers: Sequence[Picker]) -> None:
        super().connect(pickers)
        self.pickers, self.most = list(pickers), 0

    def exchange(self, now_s: float) -> None:
        super().exchange(now_s)
        for picker in self.pickers:
            for server in picker.fleet:
                others = [other.fleet.servers[server.name] for other in self.pickers if other is not picker]
                assert server.elsewhere == sum(other.in_flight for other in others)
                assert server.elsewhere_prefilling == sum(other.prefilling for other in others)
                self.most = max(self.most, server.elsewhere)


def test_counts_elsewhere_are_those_of_the_others() -> None:
    requests = [request for request in tenants(0.6, 2) if request.at_s < 60]
    exchange = Watched()
    setup = RoutingSetup(usage=True, seed=1, routers=3, exchange_s=0.2)
    simulate(requests, [sharing_strategy("least-ttft", setup.server_names) for _ in range(3)], setup, exchange=exchange)
    assert exchange.most > 5
