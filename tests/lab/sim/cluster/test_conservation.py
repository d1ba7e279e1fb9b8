"""Whatever happens, every request ends once, every token is somewhere, no request stays on the scheduler's books."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.sim.cluster.toy import scripted

from skymemory.conductor.cost_model import Medium
from skymemory.conductor.picker import Scorer, Server
from skymemory.conductor.request import Request, Slo
from skymemory.conductor.scheduler import Admission, Refusal, ScheduledRequest, Scheduler
from skymemory_lab.sim.cluster.outcome import ClusterRun
from skymemory_lab.sim.cluster.schedulers import World, scheduler_named
from skymemory_lab.sim.cluster.setup import ClusterSetup, InstanceFailure, PoolSettings
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest

BLOCK_BYTES = 160 << 20


class Dice(Admission):
    """A rule that counts, and refuses by chance."""

    name = "dice"

    def __init__(self, seed: int, share: float) -> None:
        self._dice, self._share = random.Random(seed), share
        self.open = 0

    def _roll(self) -> Refusal | None:
        return Refusal("by chance", 1.0) if self._dice.random() < self._share else None

    def on_arrival(self, case: ScheduledRequest, now_s: float) -> Refusal | None:
        return self._roll()

    def before_decode(self, case: ScheduledRequest, now_s: float) -> Refusal | None:
        return self._roll()

    def accepted(self, case: ScheduledRequest, now_s: float) -> None:
        self.open += 1

    def on_request_end(self, case: ScheduledRequest, now_s: float, met: bool | None) -> None:
        self.open -= 1


class Ledger:
    """Stands before a scorer, and checks the way of each request: sent, then first byte or failure, then its end."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer, self.name = scorer, scorer.name
        self.sent: Counter[tuple[int, str]] = Counter()
        self.answering: Counter[tuple[int, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def _moves(self, request: Request, server: Server, begin: Counter[tuple[int, str]]) -> tuple[int, str]:
        key = (id(request), server.name)
        assert begin[key] == 1, "it was not there"
        del begin[key]
        return key

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        assert server.healthy
        self.sent[id(request), server.name] += 1
        self._scorer.routed(request, server, now_s)

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        self.answering[self._moves(request, server, self.sent)] += 1
        self._scorer.succeeded(request, server, now_s, cached_tokens)

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        self._moves(request, server, self.sent)
        self._scorer.failed(request, server, now_s)

    def on_request_end(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        self._moves(request, server, self.answering)
        self._scorer.on_request_end(request, server, now_s)


def drawn(seed: int, count: int) -> list[TraceRequest]:
    """Prompts that share beginnings, in bursts."""
    dice = random.Random(seed)
    requests = []
    for number in range(count):
        depth = dice.randint(0, 12)
        stem = tuple(100 * dice.randint(0, 2) + at for at in range(depth))
        ids = (*stem, 10_000 + number)
        tokens = 512 * len(stem) + dice.randint(1, 512)
        requests.append(
            TraceRequest(dice.choice((0.0, dice.uniform(0, 20))), tokens, dice.randint(0, 200), ids, number)
        )
    return sorted(requests, key=lambda one: one.at_s)


def check(requests: list[TraceRequest], setup: ClusterSetup, name: str, seed: int, refused: float) -> ClusterRun:
    rule = Dice(seed, refused)
    made: list[tuple[World, Scheduler]] = []
    ledgers: list[Ledger] = []

    def factory(world: World) -> Scheduler:
        scheduler = scheduler_named(name, world)
        for picker in (scheduler.prefill, scheduler.decode):
            if picker is not None:
                ledger = Ledger(picker.scorer)
                picker.scorer = ledger  # type: ignore[assignment]
                ledgers.append(ledger)
        made.append((world, scheduler))
        return scheduler

    run = run_cluster(requests, setup, factory, rule)
    (world, _), *_ = made
    assert rule.open == 0, "every admitted request has ended"
    assert not any(ledger.sent or ledger.answering for ledger in ledgers)
    for server in (*world.prefill, *(world.decode or ())):
        assert (server.in_flight, server.prefilling, server.prefill_tokens) == (0, 0, 0.0)
    assert len(run.outcomes) == len(requests)
    for one, request in zip(run.outcomes, requests, strict=True):
        assert (one.at_s, one.prompt_tokens) == (request.at_s, request.input_tokens)
        assert one.end_s is not None and one.end_s >= one.at_s
        if one.status in ("completed", "refused_after_prefill"):
            assert one.computed_tokens >= 1
            assert one.computed_tokens + one.cached_tokens == one.prompt_tokens
            assert one.prefill_s > 0
        if one.status == "completed":
            assert one.ttft_s is not None and one.at_s + one.ttft_s <= one.end_s + 1e-9
            assert (one.tbt_mean_s is None) == (one.tbt_max_s is None) == (one.output_tokens == 1)
        if one.status == "refused":
            assert (one.prefill, one.prefill_s) == (None, 0.0)
        if not setup.failures:
            assert one.status != "failed"
    finished = [one for one in run.outcomes if one.status == "completed"]
    tokens = sum(one.output_tokens - 1 for one in finished)
    assert sum(run.gap_tokens) == tokens if not setup.failures else sum(run.gap_tokens) >= tokens
    if not setup.failures:
        spent_s = sum(one.prefill_s for one in run.outcomes)
        assert spent_s == pytest.approx(sum(run.prefill_busy_s) * setup.pipeline, rel=1e-9)
    return run


APART = ("random", "load-balance", "cache-aware", "kvcache-centric", "round-robin", "least-ttft")


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(APART),
    refused=st.sampled_from([0.0, 0.0, 0.3]),
    pipeline=st.sampled_from([1, 1, 2]),
    blocks=st.integers(1, 40),
    kv_tokens=st.sampled_from([7_000, 20_000, 1_000_000]),
    deaths=st.lists(
        st.tuples(st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1"]), st.floats(0, 25)), max_size=4
    ),
    retries=st.integers(0, 2),
)
def test_apart(
    seed: int,
    name: str,
    refused: float,
    pipeline: int,
    blocks: int,
    kv_tokens: int,
    deaths: list[tuple[str, float]],
    retries: int,
) -> None:
    setup = ClusterSetup(
        prefill=2 * pipeline,
        decode=2,
        pipeline=pipeline,
        chunk_tokens=1_000,
        kv_tokens=kv_tokens,
        most_batch=6,
        pool=PoolSettings(dram_bytes=blocks * BLOCK_BYTES, ssd_bytes=BLOCK_BYTES * (seed % 2) * 20),
        failures=tuple(InstanceFailure(instance, at_s, 3.0) for instance, at_s in deaths),
        retries=retries,
        slo=Slo(5.0, 0.05),
        error=0.2,
        tells_output=bool(seed % 3),
    )
    check(drawn(seed, 40), setup, name, seed, refused)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(["round-robin", "least-load", "least-ttft", "cache-aware"]),
    mixed=st.sampled_from([0, 64, 2_048]),
    refused=st.sampled_from([0.0, 0.3]),
    deaths=st.lists(st.tuples(st.sampled_from(["coupled-0", "coupled-1"]), st.floats(0, 25)), max_size=3),
)
def test_coupled(seed: int, name: str, mixed: int, refused: float, deaths: list[tuple[str, float]]) -> None:
    setup = ClusterSetup(
        prefill=0,
        decode=0,
        coupled=2,
        mixed_tokens=mixed,
        kv_tokens=20_000,
        coupled_cache_tokens=10_000,
        failures=tuple(InstanceFailure(instance, at_s, 3.0) for instance, at_s in deaths),
    )
    check(drawn(seed, 40), setup, name, seed, refused)


def test_who_was_at_a_dead_machine_is_served_by_another_once() -> None:
    requests = [TraceRequest(0.0, 20_000, 50, tuple(range(40)))] * 4
    setup = ClusterSetup(prefill=2, decode=2, failures=(InstanceFailure("prefill-0", 1.0, 5.0),))
    assert {one.status for one in run_cluster(requests, setup).outcomes} == {"completed"}
    without = ClusterSetup(prefill=2, decode=2, failures=setup.failures, retries=0)
    statuses = [one.status for one in run_cluster(requests, without).outcomes]
    assert sorted(statuses) == ["completed", "completed", "failed", "failed"]


def test_a_machine_that_was_dead_has_lost_its_cache() -> None:
    requests = [TraceRequest(at_s, 1_024, 1, (1, 2)) for at_s in (0.0, 10.0, 30.0)]
    setup = ClusterSetup(prefill=1, decode=1, failures=(InstanceFailure("prefill-0", 20.0, 5.0),))
    assert [one.held_tokens for one in run_cluster(requests, setup).outcomes] == [0, 1_023, 0]


def test_a_machine_that_was_dead_is_not_believed_to_hold_anything() -> None:
    matched = []

    def factory(world: World) -> Scheduler:
        scheduler = scheduler_named("least-ttft", world)
        begin = scheduler.begin

        def noting(placement: ScheduledRequest, now_s: float) -> None:
            matched.append(placement.prefill.matched_tokens)
            begin(placement, now_s)

        scheduler.begin = noting  # type: ignore[method-assign]
        return scheduler

    requests = [TraceRequest(at_s, 1_024, 1, (1, 2)) for at_s in (0.0, 10.0, 30.0)]
    run_cluster(
        requests, ClusterSetup(prefill=1, decode=1, failures=(InstanceFailure("prefill-0", 20.0, 5.0),)), factory
    )
    assert matched == [0, 1_024, 0]


def test_a_machine_that_dies_while_its_kv_goes_away_takes_the_request_with_it() -> None:
    slow = PoolSettings(network=Medium("network", BLOCK_BYTES / 10))  # ten seconds for a block
    failures = (InstanceFailure("prefill-0", 8.0, 100.0),)
    setup = ClusterSetup(prefill=2, decode=1, pool=slow, failures=failures, spans=True)
    request = TraceRequest(0.0, 1_024, 2, (1, 2))
    for name in ("prefill-0", "prefill-1"):
        run = run_cluster([request], setup, scripted(lambda request, name=name: (name, None)))
        (one,) = run.outcomes
        assert one.status == "completed"
        if name == "prefill-1":
            assert (one.prefill, one.end_s) == (1, pytest.approx(20.0, abs=1.0))
        else:
            assert one.prefill == 1, "sent to the dead one, it goes to the other"
            assert one.ttft_s == pytest.approx(8.0, abs=0.5), "its first token is that of the second try"
            assert one.end_s == pytest.approx(40.0, abs=1.0), "its KV goes behind the dead one's, that was asked for"
            assert [span.what for span in run.spans] == ["prefill", "transfer", "prefill", "transfer", "decode"]


def test_no_server_is_there_to_serve() -> None:
    setup = ClusterSetup(prefill=1, decode=1, failures=(InstanceFailure("prefill-0", 0.0, 5.0),))
    first, second = run_cluster([TraceRequest(1.0, 100, 2, (1,)), TraceRequest(6.0, 100, 2, (1,))], setup).outcomes
    assert (first.status, second.status) == ("failed", "completed")
