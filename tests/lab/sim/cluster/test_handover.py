"""A prompt handed over through a store: when its first token comes, and what the decode instance's batch waits for."""

from __future__ import annotations

import pytest
from tests.lab.sim.cluster.toy import TOY

from skymemory.errors import InvalidInput
from skymemory_lab.sim.cluster.outcome import RequestOutcome
from skymemory_lab.sim.cluster.setup import ClusterSetup, PromptHandover
from skymemory_lab.sim.cluster.simulation import run_cluster
from skymemory_lab.sim.trace import TraceRequest

OVER = PromptHandover(save_s=0.5, save_token_s=1e-3, fetch_s=0.25, fetch_token_s=2e-3, take_s=0.125, take_token_s=1e-4)


def run(requests: list[TraceRequest], request_s: float = 0.0) -> list[RequestOutcome]:
    setup = ClusterSetup(prefill=1, decode=1, cost=TOY, handover=OVER, request_s=request_s)
    return list(run_cluster(requests, setup, "cache-aware").outcomes)


@pytest.mark.parametrize("answer", [1, 5])
def test_an_idle_cluster_gives_the_first_token_after_each_part_once(answer: int) -> None:
    (one,) = run([TraceRequest(0.0, 700, answer, (1, 2))], request_s=3.0)
    alone_s = TOY.prefill_s(700) + 0.5 + 0.7 + 0.25 + 1.4 + 0.125 + 0.07
    assert one.ttft_s == pytest.approx(3.0 + alone_s)
    assert one.status == "completed"


def test_what_the_decode_instance_has_is_not_fetched_again() -> None:
    first, second = run([TraceRequest(0.0, 1024, 1, (1, 2)), TraceRequest(1e5, 1024, 1, (1, 2))])
    assert first.ttft_s is not None and second.ttft_s is not None
    beside_s = 0.5 + 0.25 + 0.125 + 0.1024
    assert first.ttft_s == pytest.approx(TOY.prefill_s(1024) + 1.024 + 2.048 + beside_s)
    assert second.ttft_s == pytest.approx(TOY.prefill_s(1024, 1023) + 0.001 + beside_s, rel=1e-3)


def test_a_prompt_that_is_taken_over_holds_up_the_tokens_of_others() -> None:
    many = [TraceRequest(0.0, 512, 400, (1,)), TraceRequest(20.0, 512, 2, (7,))]
    lone = run(many[:1])[0]
    first = run(many)[0]
    assert lone.end_s is not None and first.end_s is not None and lone.tbt_max_s is not None
    assert lone.end_s > 40.0, "it is still decoding when the other is taken over"
    assert first.end_s >= lone.end_s + OVER.take_s + OVER.take_token_s * 512 - 1e-9
    assert first.tbt_max_s is not None and first.tbt_max_s >= lone.tbt_max_s + OVER.take_s - 1e-9


def test_bad_settings_are_refused() -> None:
    for words in ({"save_s": -1.0}, {"take_s": 0.0}, {"fetch_token_s": float("inf")}):
        with pytest.raises(InvalidInput, match="handover"):
            PromptHandover(**words)
    with pytest.raises(InvalidInput, match="fixed pools"):
        ClusterSetup(prefill=0, decode=0, coupled=2, handover=OVER)
