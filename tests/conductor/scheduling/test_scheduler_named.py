"""Schedulers by name, and the account that they keep."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conductor.scheduling.worlds import KnownHoldings, Quadratic, a_request, fleet_of

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.picker import Fleet
from skymemory.conductor.scheduler import Admission, Refusal, ScheduledRequest, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.scheduling.kvcache_centric import LoadSources
from skymemory.conductor.scheduling.prefill import PrefillScheduler
from skymemory.conductor.scheduling.registry import NAMES, SCHEDULERS, build, prefill_scorer
from skymemory.errors import InvalidInput


def made(name: str, decode: bool = True, decode_s: float | None = None, **options: Any) -> Scheduler:
    return build(
        name,
        prefill=fleet_of(3),
        decoding=LeastTbt(LLAMA_70B_8xA800, fleet_of(2), decode_s=decode_s) if decode else None,
        cost=LLAMA_70B_8xA800,
        holdings=KnownHoldings({0: 8, 1: 3}),
        **options,
    )


class Moody(Admission):
    """Refuses the given requests."""

    name = "moody"

    def __init__(self) -> None:
        self.at_arrival = self.before = False
        self.open = 0

    def on_arrival(self, case: ScheduledRequest, now_s: float) -> Refusal | None:
        return Refusal("no", 1.0) if self.at_arrival else None

    def before_decode(self, case: ScheduledRequest, now_s: float) -> Refusal | None:
        return Refusal("no", 1.0) if self.before else None

    def accepted(self, case: ScheduledRequest, now_s: float) -> None:
        self.open += 1

    def on_request_end(self, case: ScheduledRequest, now_s: float, met: bool | None) -> None:
        self.open -= 1


def test_each_has_a_name_a_line_and_options() -> None:
    assert NAMES == ("random", "load-balance", "cache-aware", "kvcache-centric")
    for name in NAMES:
        assert SCHEDULERS[name].description
        assert made(name).prefill.scorer.name == name
    assert SCHEDULERS.options_of("kvcache-centric")["variant"] == "cheaper"
    assert isinstance(made("random").decode.scorer, LeastTbt)  # type: ignore[union-attr]


def test_what_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"no scheduler 'cache-awre'; did you mean 'cache-aware'\?"):
        made("cache-awre")
    with pytest.raises(InvalidInput, match=r"no option 'balancing_treshold'; did you mean 'balancing_threshold'\?"):
        made("kvcache-centric", balancing_treshold=2)
    with pytest.raises(InvalidInput, match="no scheduler 'x'"):
        prefill_scorer("x", cost=LLAMA_70B_8xA800, holdings=KnownHoldings())


def test_words_are_taken_for_numbers() -> None:
    scheduler = made("kvcache-centric", variant="arxiv", balancing_threshold="3", cake="no")
    taken = scheduler.prefill.scorer.settings  # type: ignore[attr-defined]
    assert (taken.variant, taken.balancing_threshold, taken.cake) == ("arxiv", 3.0, False)


def test_how_the_four_choose() -> None:
    """s0 holds 8 of 10 blocks and is busy for long, s1 holds 3; s2 is idle and holds nothing."""
    chosen = {}
    for name in NAMES:
        scheduler = made(name, sources=LoadSources())
        for server, seed in (("s0", 1), ("s0", 2), ("s1", 3)):
            placed = scheduler.place(a_request(300, seed=seed), 0.0, {server})
            assert isinstance(placed, ScheduledRequest)
            scheduler.begin(placed, 0.0)
        placed = [scheduler.place(a_request(10), 0.0) for _ in range(30)]
        chosen[name] = {one.prefill.server for one in placed if isinstance(one, ScheduledRequest)}
    assert chosen["random"] == {"s0", "s1", "s2"}
    assert chosen["load-balance"] == chosen["cache-aware"] == chosen["kvcache-centric"] == {"s2"}
    with_network = made("kvcache-centric")
    placed = with_network.place(a_request(10), 0.0, {"s2"})
    assert isinstance(placed, ScheduledRequest) and placed.prefill.plan is not None
    assert placed.prefill.plan.source == "s0" and placed.prefill.plan.loaded_tokens == 80


def test_the_decoding_server_knows_when_to_expect_a_request() -> None:
    scheduler = made("cache-aware", decode_s=1e6)
    placed = scheduler.place(a_request(3000), 5.0)
    assert isinstance(placed, ScheduledRequest) and placed.prefill.estimated_ttft_s is not None
    scheduler.begin(placed, 5.0)
    comes_s = 5.0 + placed.prefill.estimated_ttft_s
    assert isinstance(scheduler.forecast, LeastTbt)
    before, after = (scheduler.forecast.tbt_s(comes_s + off_s, 5.0) for off_s in (-0.001, 0.001))
    assert before < after


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["place", "again", "refused", "prefilled", "spurned", "decoding", "ended", "failed", "lost"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(NAMES), st.booleans(), _STEPS)
def test_all_counters_return_to_nothing(name: str, apart: bool, steps: list[tuple[str, int]]) -> None:
    moody = Moody()
    scheduler = made(name, apart, admission=moody, **({"delay_weight": 0.3} if name == "kvcache-centric" else {}))
    live: dict[int, tuple[ScheduledRequest, str]] = {}
    now_s = 0.0
    for number, (step, which) in enumerate(steps):
        now_s += 0.1
        moody.at_arrival, moody.before = step == "refused", step == "spurned"
        if step in ("place", "again", "refused"):
            same = (
                next(iter(live.values()))[0].request if step == "again" and live else a_request(which * 4, seed=which)
            )
            placed = scheduler.place(same, now_s)
            if isinstance(placed, ScheduledRequest):
                scheduler.begin(placed, now_s)
                live[number] = placed, "begun"
        elif live:
            _advance(scheduler, live, list(live)[which % len(live)], step, now_s)
    moody.before = False
    for key in list(live):
        for step in ("prefilled", "decoding", "ended"):
            if key in live:
                now_s += 0.1
                _advance(scheduler, live, key, step, now_s)
    assert not live and moody.open == 0
    fleets: list[Fleet] = [scheduler.prefill.fleet] + ([scheduler.decode.fleet] if scheduler.decode else [])
    for server in (server for fleet in fleets for server in fleet):
        assert (server.in_flight, server.prefilling, server.prefill_tokens) == (0, 0, 0.0)
    scorer = scheduler.prefill.scorer
    assert isinstance(scorer, PrefillScheduler)
    assert [scorer.load_s(server, now_s) for server in scheduler.prefill.fleet] == [0.0] * 3
    assert not len(scorer._sent) and not len(scorer._under_way) and not len(scorer._notes)
    if scheduler.decode is not None:
        decoding = scheduler.decode.scorer
        assert isinstance(decoding, LeastTbt)
        assert not decoding._open and not decoding._expected
        for batch in decoding._batches.values():
            sums = (batch.joined, batch.promised, batch.joined_tokens, batch.promised_tokens, batch.joined_at_s)
            assert sums == (0, 0, 0, 0, 0.0) and not batch.booked


def _advance(
    scheduler: Scheduler, live: dict[int, tuple[ScheduledRequest, str]], key: int, step: str, now_s: float
) -> None:
    """The next that may happen to a request, if ``step`` is that."""
    placed, state = live[key]
    apart = scheduler.decode is not None
    if step == "failed":
        scheduler.failed(placed, now_s, prefilled=state != "begun", decoding=state == "decoding")
        del live[key]
    elif step in ("prefilled", "spurned") and state == "begun":
        if scheduler.prefilled(placed, now_s) is not None:
            del live[key]
        else:
            live[key] = placed, "prefilled" if apart else "decoding"
    elif step == "decoding" and state == "prefilled":
        scheduler.decoding(placed, now_s)
        live[key] = placed, "decoding"
    elif step == "ended" and state == "decoding":
        scheduler.on_request_end(placed, now_s, met=True)
        del live[key]


def test_machines_in_a_pipeline_have_a_cost_of_their_own() -> None:
    placed = made("cache-aware", prefill_cost=Quadratic(7.0)).place(a_request(1), 0.0, {"s2"})
    assert isinstance(placed, ScheduledRequest) and placed.prefill.estimated_ttft_s == 70.0


class TwoMachines(Quadratic):
    """Half of what a prefill takes, the first machine is free."""

    def drain_s(self, tokens: float, cached: float) -> float:
        return self.prefill_s(tokens, cached) / 2


def test_the_next_begins_when_the_first_machine_of_a_pipeline_is_free() -> None:
    scheduler = made("cache-aware", prefill_cost=TwoMachines())
    sent = []
    for seed in range(3):
        placed = scheduler.place(a_request(10, seed=seed), 0.0, {"s2"})
        assert isinstance(placed, ScheduledRequest)
        scheduler.begin(placed, 0.0)
        sent.append(placed)
    assert [one.prefill.plan.queue_s for one in sent if one.prefill.plan] == [0.0, 50.0, 100.0]
    scorer, server = scheduler.prefill.scorer, scheduler.prefill.fleet.servers["s2"]
    assert isinstance(scorer, PrefillScheduler)
    # The second began at 50 and the third at 100; the first is done at 100, the second at 150.
    assert [scorer.load_s(server, now_s) for now_s in (20.0, 60.0, 99.0)] == [130.0, 90.0, 51.0]
    scheduler.prefilled(sent[0], 100.0)
    assert [scorer.load_s(server, now_s) for now_s in (100.0, 140.0)] == [50.0, 10.0]
    scheduler.prefilled(sent[1], 150.0)
    assert scorer.load_s(server, 170.0) == 0.0
    assert scorer.load_s(server, 300.0) > 0.0, "it should have been done at 200"
