"""The generator: whether its statistics are those that are claimed, and whether its text shares what its ids share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.sim.distributions import Popularity
from skymemory_lab.sim.prompt_text import render_text
from skymemory_lab.sim.trace import TraceRequest, ideal_hits, read_trace
from skymemory_lab.sim.workload import AGENTS, CONVERSATIONS, TENANTS, WORKLOADS, generate

TRACE = Path(__file__).parents[4] / "shared/data/traces/conversation_trace.jsonl"
HOUR_S = 3_537.0


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of their first items are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def statistics(requests: list[TraceRequest]) -> dict[str, float]:
    inputs = np.array([request.input_tokens for request in requests])
    outputs = np.array([request.output_tokens for request in requests])
    hits, asked = ideal_hits(requests, partial=True)
    seen: set[int] = set()
    last_s: dict[int, float] = {}
    fresh, pauses = 0, []
    for request in requests:
        known = next((at for at, one in enumerate(request.ids) if one not in seen), len(request.ids))
        if known > 1:
            pauses.append(request.at_s - last_s[request.ids[known - 1]])
        fresh += known <= 1
        seen.update(request.ids)
        last_s.update(dict.fromkeys(request.ids, request.at_s))
    uses = Counter(one for request in requests for one in request.ids)
    return {
        "requests a second": len(requests) / (requests[-1].at_s - requests[0].at_s),
        "mean input": float(inputs.mean()),
        "median input": float(np.median(inputs)),
        "90 % input": float(np.percentile(inputs, 90)),
        "99 % input": float(np.percentile(inputs, 99)),
        "mean output": float(outputs.mean()),
        "median output": float(np.median(outputs)),
        "median pause": float(np.median(pauses)),
        "ideal hits": hits / asked,
        "start over": fresh / len(requests),
        "ids used once": sum(count == 1 for count in uses.values()) / len(uses),
    }


@pytest.mark.brief()
def test_conversations_are_like_the_published_trace() -> None:
    """The trace's own figures, as ``test_the_figures_are_the_trace_s`` computes them, and how near we come."""
    got = statistics(generate(CONVERSATIONS, HOUR_S, seed=1))
    for name, (published, tolerance) in FIGURES.items():
        assert got[name] == pytest.approx(published, rel=tolerance), name


FIGURES = {
    "requests a second": (3.40, 0.05),
    "mean input": (12_035, 0.05),
    "median input": (6_909, 0.10),
    "90 % input": (27_367, 0.08),
    "99 % input": (85_400, 0.20),
    "mean output": (343, 0.08),
    "median output": (350, 0.05),
    "median pause": (123, 0.08),
    "ideal hits": (0.366, 0.15),
    "start over": (0.613, 0.08),
    "ids used once": (0.758, 0.15),
}


@pytest.mark.skipif(not TRACE.is_file(), reason=f"the trace is not shipped; put it at {TRACE}")
def test_the_figures_are_the_trace_s() -> None:
    of_trace = statistics(read_trace(TRACE))
    for name, (published, _) in FIGURES.items():
        assert of_trace[name] == pytest.approx(published, rel=0.005), name


def test_tenants_are_something_else() -> None:
    requests = generate(TENANTS, 300.0, seed=1)
    got = statistics(requests)
    assert got["mean output"] > 2 * FIGURES["mean output"][0] and got["median input"] < FIGURES["median input"][0]
    assert got["ideal hits"] > 0.6 and got["start over"] < 0.2
    assert len({request.ids[0] for request in requests}) > 300
    assert len({request.at_s for request in requests}) == len(requests)


def test_agents_call_in_loops() -> None:
    """Long prompts that grow by little, a dozen times within minutes."""
    requests = generate(AGENTS, 600.0, seed=1)
    got = statistics(requests)
    assert got["mean output"] < 250 and got["median input"] > 20_000 and got["ideal hits"] > 0.85
    turns = Counter(request.session for request in requests)
    assert 5 < sum(turns.values()) / len(turns) < 20
    by_session: dict[int, list[float]] = {}
    for request in requests:
        by_session.setdefault(request.session, []).append(request.at_s)
    pauses = sorted(b - a for times in by_session.values() for a, b in pairwise(times))
    assert pauses[len(pauses) // 2] < 12.0


def test_what_is_popular_moves_on() -> None:
    dice = random.Random(1)
    popular = Popularity(50, 1.2, moves_every_s=10.0, moves_by=7)
    weights = popular.weights()

    def favourite(at_s: float) -> int:
        return Counter(popular.draw(dice, weights, at_s) for _ in range(500)).most_common(1)[0][0]

    assert [favourite(at_s) for at_s in (0.0, 9.9, 10.0, 35.0)] == [0, 0, 7, 21]


@pytest.mark.brief("conversations")
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_is_seeded_sorted_and_a_true_tree_of_prefixes(name: str) -> None:
    requests = generate(WORKLOADS[name], 200.0, seed=3)
    assert requests == generate(WORKLOADS[name], 200.0, seed=3) != generate(WORKLOADS[name], 200.0, seed=4)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert all(0 <= request.at_s < 200.0 for request in requests)
    parents: dict[int, tuple[int, ...]] = {}
    for request in requests:
        assert len(request.ids) == -(-request.input_tokens // 512)
        for depth, one in enumerate(request.ids):
            assert parents.setdefault(one, request.ids[:depth]) == request.ids[:depth], "one id behind two prefixes"


def test_a_turn_begins_with_the_whole_blocks_of_the_turn_before() -> None:
    turns: dict[int, TraceRequest] = {}
    longer = 0
    for request in generate(replace(CONVERSATIONS, batch_s=0.0), 600.0, seed=2):
        before = turns.get(request.session)
        if before is not None:
            whole = len(before.blocks())
            assert request.ids[:whole] == before.blocks() and request.input_tokens > before.input_tokens
            longer += len(before.ids) > whole and request.ids[whole] != before.ids[whole]
        turns[request.session] = request
    assert longer > 50, "a block that was not full gets another name when it is"


def test_batches_come_when_they_are_said_to() -> None:
    requests = generate(CONVERSATIONS, 120.0, seed=5)
    assert {round(request.at_s / 3.0, 6) % 1 for request in requests} == {0.0}


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("nan")])
def test_refuses_no_time_at_all(duration_s: float) -> None:
    with pytest.raises(InvalidInput):
        generate(CONVERSATIONS, duration_s, seed=1)


def test_text_shares_what_ids_share_and_no_more() -> None:
    requests = generate(TENANTS, 20.0, seed=6)
    texts = [render_text(request, 64) for request in requests]
    for (one, its), (other, others) in zip(
        zip(requests, texts, strict=True), zip(requests[1:], texts[1:], strict=True), strict=False
    ):
        whole = min(len(one.blocks()), len(other.blocks()))
        shared = alike(one.ids[:whole], other.ids[:whole])
        same = alike(its, others)
        assert 64 * shared <= same < 64 * (shared + 1), "text is equal just as far as ids are"
    first = requests[0]
    assert texts[0] == render_text(first, 64) and texts[0].isascii()
    rest = first.input_tokens % 512
    assert len(texts[0]) == 64 * len(first.blocks()) + (max(1, rest * 64 // 512) if rest else 0)
    with pytest.raises(InvalidInput, match="8 or more"):
        render_text(first, 7)
