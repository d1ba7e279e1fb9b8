"""Several routers in the simulator: who gets what, what each knows, and when they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from skymemory.conductor.picker import Picker, Ranking, Scorer, Server
from skymemory.conductor.request import Request
from skymemory.conductor.strategies.registry import named
from skymemory.conductor.strategies.simple import LeastLoad
from skymemory.errors import InvalidInput
from skymemory_lab.sim.routed_strategies import EngineEvents, strategy_for
from skymemory_lab.sim.routing import RoutingSetup, ServerFault, measured, simulate
from skymemory_lab.sim.trace import TraceRequest
from skymemory_lab.sim.workload import TENANTS, generate

THREE = RoutingSetup(servers=2, routers=3, seed=5)


class Own(Scorer):
    """Least load by its own requests, which it keeps."""

    name = "own"

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.seen: list[tuple[int, ...]] = []
        self.capacities: set[int | None] = set()

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        self.seen.append(tuple(server.in_flight for server in servers))
        self.capacities.update(server.reported and server.reported.cache_blocks for server in servers)
        return Ranking([-float(server.in_flight) for server in servers])

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        self.sent.append(int(request.session))


def test_each_router_gets_a_share_and_knows_its_own_requests() -> None:
    requests = [TraceRequest(0.001 * at, 600, 100, (at, at + 1_000), at) for at in range(90)]
    scorers = [Own(), Own(), Own()]
    outcomes = simulate(requests, scorers, THREE)
    assert sorted(number for one in scorers for number in one.sent) == list(range(90))
    assert all(20 <= len(one.sent) <= 40 for one in scorers)
    assert [[at for at, one in enumerate(outcomes) if one.router == number] for number in range(3)] == [
        one.sent for one in scorers
    ]
    # No answer has ended by then, so each has sent as many as it sees in flight; reports reach all.
    assert all(sum(seen) == at for one in scorers for at, seen in enumerate(one.seen))
    assert all(one.capacities == {THREE.cache_blocks} for one in scorers)
    other = [one.router for one in simulate(requests, [Own(), Own(), Own()], replace(THREE, seed=6))]
    assert other != [one.router for one in outcomes]


def test_events_reach_every_router() -> None:
    setup = RoutingSetup(servers=1, routers=2, cache_blocks=200, engine="chunk")
    requests = [replace(one, at_s=50.0 * at) for at, one in enumerate(generate(TENANTS, 3.0, seed=2))]
    pairs = [strategy_for("precise", setup, 0.0) for _ in range(2)]
    simulate(requests, [scorer for scorer, _ in pairs], setup, [events for _, events in pairs])
    first, second = (events.index.blocks_of(0) for _, events in pairs if isinstance(events, EngineEvents))
    assert first == second > 190, "all but the room that answers took"


class Exchange:
    """Calls of an exchange."""

    def __init__(self) -> None:
        self.pickers: Sequence[Picker] = ()
        self.calls: list[tuple[float, int]] = []

    def connect(self, pickers: Sequence[Picker]) -> None:
        self.pickers = pickers

    def exchange(self, now_s: float) -> None:
        flying = sum(server.in_flight for picker in self.pickers for server in picker.fleet)
        self.calls.append((round(now_s, 6), flying))


def test_routers_exchange_but_in_an_outage() -> None:
    """The one request is there from 0.5 s on, and answered 4 s later."""
    setup = replace(THREE, exchange_s=0.4, outage=(1.1, 2.5), decode_token_s=1.0, servers=1)
    exchange = Exchange()
    requests = [TraceRequest(0.5, 512, 4, (1,), 0), TraceRequest(6.0, 512, 1, (1,), 1)]
    simulate(requests, [LeastLoad(), LeastLoad(), LeastLoad()], setup, exchange=exchange)
    assert [picker.fleet.servers["server-0"].slot for picker in exchange.pickers] == [0, 0, 0]
    at = dict(exchange.calls)
    assert list(at)[:6] == [0.4, 0.8, 2.8, 3.2, 3.6, 4.0] and len(at) == len(exchange.calls)
    assert (at[0.4], at[0.8], at[4.4], at[5.2]) == (0, 1, 1, 0)
    silent = Exchange()
    simulate(requests, [LeastLoad(), LeastLoad(), LeastLoad()], replace(setup, exchange_s=None), exchange=silent)
    assert len(silent.pickers) == 3 and not silent.calls


def test_refuses_routers_without_a_strategy_each_and_impossible_settings() -> None:
    with pytest.raises(InvalidInput, match="2 strategies for 3 routers"):
        simulate([], [LeastLoad(), LeastLoad()], THREE)
    for wrong in (
        {"routers": 0},
        {"exchange_s": 0.0},
        {"engine": "steam"},
        {"timeout_s": 0.0},
        {"decode_more_s": -1.0},
        {"faults": (ServerFault("slow", 2),)},
    ):
        with pytest.raises(InvalidInput):
            replace(THREE, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="from_s before until_s"):
        ServerFault("hung", 0, 5.0, 5.0)
    with pytest.raises(InvalidInput, match="factor"):
        ServerFault("slow", 0, factor=0.0)


@pytest.mark.brief()
def test_routers_with_separate_state_are_slower_than_one() -> None:
    requests = generate(TENANTS, 120.0, seed=3)
    means = []
    for routers in (1, 4):
        setup = RoutingSetup(routers=routers, cache_blocks=2_000, usage=True)
        scorers = [named("least-ttft") for _ in range(routers)]
        means.append(measured(simulate(requests, scorers, setup), setup.servers, 40.0).mean_s)
    assert means[1] > 1.5 * means[0], means
