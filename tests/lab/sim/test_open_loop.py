"""Poisson workloads: lengths and reuse as Mooncake's table 2 states them, arrivals as a Poisson process has them."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.sim.trace import BLOCK_TOKENS, TraceRequest, block_uses, shared_above, statistics_of
from skymemory_lab.sim.workload import (
    ARXIV,
    L_EVAL,
    OPEN_LOOPS,
    SIMULATED,
    LogNormal,
    OpenLoop,
    Popularity,
    poisson,
    scaled,
)

_TABLE_2 = {
    "arxiv": (8_088, 229, (0.0, 0.001)),
    "l-eval": (19_019, 72, (0.80, 0.95)),
    "simulated-16k": (16_384, 512, (0.45, 0.50)),
    "simulated-32k": (32_768, 512, (0.45, 0.50)),
    "simulated-64k": (65_536, 512, (0.45, 0.50)),
    "simulated-128k": (131_072, 512, (0.45, 0.50)),
}


@pytest.mark.brief("l-eval", "simulated-16k", "arxiv", "simulated-32k")
@pytest.mark.parametrize("name", sorted(OPEN_LOOPS))
def test_has_the_statistics_of_table_2(name: str) -> None:
    tokens, output, (least, most) = _TABLE_2[name]
    found = statistics_of(poisson(OPEN_LOOPS[name], 1.0, 1_000, seed=1))
    assert found.mean_prompt_tokens == pytest.approx(tokens, rel=0.05)
    assert found.mean_output_tokens == pytest.approx(output, rel=0.05)
    assert least <= found.ideal_token_hits <= most


def test_arrives_as_a_poisson_process_does() -> None:
    requests = poisson(ARXIV, 4.0, 4_000, seed=3)
    gaps = [after.at_s - before.at_s for before, after in pairwise(requests)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    counts = [0] * 900
    for request in requests:
        if request.at_s < 900:
            counts[int(request.at_s)] += 1
    assert statistics.variance(counts) == pytest.approx(statistics.mean(counts), rel=0.15)


def test_equal_seeds_give_equal_requests_and_another_rate_only_moves_them() -> None:
    slow, fast = poisson(L_EVAL, 1.0, 200, seed=5), poisson(L_EVAL, 2.0, 200, seed=5)
    assert slow == poisson(L_EVAL, 1.0, 200, seed=5)
    assert slow != poisson(L_EVAL, 1.0, 200, seed=6)
    assert [(one.input_tokens, one.output_tokens, one.ids) for one in slow] == [
        (one.input_tokens, one.output_tokens, one.ids) for one in fast
    ]
    assert [one.at_s for one in fast] == pytest.approx([one.at_s / 2 for one in slow])


def test_prompts_of_one_prefix_share_it_and_nothing_more() -> None:
    requests = poisson(SIMULATED[0], 1.0, 100, seed=2)
    by_first: dict[int, list[TraceRequest]] = {}
    for request in requests:
        assert len(request.ids) == 16_384 // BLOCK_TOKENS
        by_first.setdefault(request.ids[0], []).append(request)
    assert 1 < len(by_first) <= SIMULATED[0].prefixes.count
    for alike in by_first.values():
        assert len({request.ids[:16] for request in alike}) == 1
        assert len({request.ids[16] for request in alike}) == len(alike)


def test_more_prefixes_hit_less() -> None:
    few, many = (
        statistics_of(poisson(scaled(SIMULATED[0], count), 1.0, 200, seed=2)).ideal_token_hits for count in (4, 100)
    )
    assert few > many + 0.1


def test_refuses_what_is_no_workload() -> None:
    with pytest.raises(InvalidInput, match="above 0"):
        poisson(ARXIV, 0.0, 5, seed=1)
    with pytest.raises(InvalidInput, match="at least 1"):
        poisson(ARXIV, 1.0, 0, seed=1)
    with pytest.raises(InvalidInput, match="shared is"):
        OpenLoop("all", LogNormal(10, 0, 10, 10), LogNormal(1, 0, 1, 1), 1.0, Popularity(1, 0))


def test_statistics_of_requests_counted_by_hand() -> None:
    requests = [
        TraceRequest(1.0, 1_024, 10, (0, 1)),
        TraceRequest(2.0, 1_300, 20, (0, 1, 2)),
        TraceRequest(5.0, 700, 30, (0, 3)),
    ]
    found = statistics_of(requests)
    assert (found.requests, found.duration_s, found.rate_per_s) == (3, 4.0, 0.75)
    assert (found.blocks, found.distinct_blocks, found.all_blocks, found.all_distinct_blocks) == (5, 2, 7, 4)
    assert found.ideal_block_hits == 3 / 5  # 0 and 1 of the second, 0 of the third
    assert found.ideal_all_block_hits == 3 / 7
    assert found.ideal_token_hits == 3 * 512 / 3_024
    assert (found.once_share, found.most_uses) == (0.5, 3)
    uses = block_uses(requests, partial=True)
    assert uses == [3, 2, 1, 1]
    assert (shared_above(uses, 2), shared_above(uses, 3)) == (0.5, 0.25)
    assert found.as_json()["mean_prompt_tokens"] == 1008.0
    with pytest.raises(InvalidInput, match="no requests"):
        statistics_of([])
