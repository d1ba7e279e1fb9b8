"""The parts that strategies share: chains of sets, learned speeds, notes, thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from tests.conductor.strategies.fleets import a_fleet, a_request

from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.picker import PrefillTotals, ReportedLoad
from skymemory.conductor.strategies.estimates import UNKNOWN, GivenSpeeds, LearnedSpeeds
from skymemory.conductor.strategies.hash_trie import depths
from skymemory.conductor.strategies.strategy_base import GainThreshold, RequestNotes, load_bound, loads_of
from skymemory.errors import InvalidInput
from skymemory.native import fit_prefills


def test_depths_are_what_walking_block_by_block_finds() -> None:
    dice = np.random.default_rng(1)
    for _ in range(200):
        chain = dice.integers(1, 2**63, size=int(dice.integers(0, 40)), dtype=np.uint64)
        reach = {slot: int(dice.integers(0, len(chain) + 1)) for slot in dice.choice(70, 9, replace=False).tolist()}
        sets: dict[int, int] = {}
        for slot, depth in reach.items():
            for block in chain[:depth].tolist():
                sets[block] = sets.get(block, 0) | 1 << slot
        assert depths(sets, chain) == {slot: depth for slot, depth in reach.items() if depth}


def test_speeds_are_learnt_from_engines_reports_and_from_whole_answers() -> None:
    dice = np.random.default_rng(6)
    from_reports, whole = LearnedSpeeds(), LearnedSpeeds()
    server = next(iter(a_fleet(1)))
    count = tokens = computed = seconds = 0.0
    for number, n in enumerate(np.exp(dice.normal(8.0, 1.0, 200)).clip(100, 60_000).astype(int).tolist()):
        held, output = n // 2 * (number % 2), int(dice.integers(20, 800))
        work_s = 2e-4 * (n - held)
        count, tokens, computed, seconds = count + 1, tokens + n, computed + n - held, seconds + work_s
        server.reported = ReportedLoad(at_s=float(number), prefills=PrefillTotals(count, tokens, computed, seconds))
        from_reports.read_reports([server])
        whole.observe_whole(0, n, held, output, work_s + 0.04 * output + dice.exponential(0.3))
    for speeds in (from_reports, whole):
        assert speeds.prefills_s([0], 10_000, [4_000])[0] == pytest.approx(1.2, rel=0.2)
    server.reported = ReportedLoad(at_s=999.0, prefills=PrefillTotals(1, 100, 100, 50.0))
    from_reports.read_reports([server])  # it was restarted
    assert from_reports.prefills_s([0], 10_000, [4_000])[0] == pytest.approx(1.2, rel=0.2)


def test_whole_answers_that_do_not_show_what_a_prefill_takes_teach_nothing() -> None:
    """Long answers to short prompts, as two engines on a busy machine gave them: the likeliest speed of a prefill may
    then be a hundred times too quick, with which no cache would be worth a detour and no queue too long.
    """
    true_s, shown = 2.5e-4, 0
    for seed in range(40):
        dice = np.random.default_rng(seed)
        speeds = LearnedSpeeds()
        for _ in range(32):
            tokens, output = int(dice.uniform(250, 600)), int(dice.integers(40, 120))
            answer_s = 0.012 * output * dice.lognormal(0.0, 0.25)
            speeds.observe_whole(0, tokens, 0, output, true_s * tokens + answer_s)
        per_token_s = speeds.prefills_s([0], 1400, [400])[0] - speeds.prefills_s([0], 400, [400])[0]
        per_token_s /= 1000
        if per_token_s != pytest.approx(UNKNOWN[1]):
            shown += 1
            assert true_s / 3 < per_token_s < true_s * 3, seed
    assert shown < 20, "here it hardly shows"


def test_a_line_is_fitted_past_what_lies_far_off_it() -> None:
    dice = np.random.default_rng(3)
    tokens = dice.uniform(100, 8000, 32)
    seconds = 0.05 + 2e-4 * tokens + dice.normal(0, 0.005, 32)
    seconds[[3, 17]] = 30.0
    fixed_s, per_token_s, bend = fit_prefills(
        [(n, 0.0, taken) for n, taken in zip(tokens.tolist(), seconds.tolist(), strict=True)]
    )
    assert fixed_s == pytest.approx(0.05, abs=0.01) and per_token_s == pytest.approx(2e-4, rel=0.03) and bend == 0.0
    assert fit_prefills([(100.0, 0.0, 0.5)] * 5) == (0.0, pytest.approx(0.005), 0.0)
    assert fit_prefills([(100.0, 0.0, 0.9), (1000.0, 0.0, 0.1), (2000.0, 0.0, 0.05)])[1] > 0


def test_speeds_are_learned_for_each_server_and_shared_until_then() -> None:
    speeds = LearnedSpeeds()
    assert speeds.line(0) == UNKNOWN
    for tokens in range(100, 4100, 100):
        speeds.observe(0, 2 * tokens, tokens, 0.1 + 1e-3 * tokens)
    assert speeds.line(0) == pytest.approx((0.1, 1e-3, 0.0))
    assert speeds.line(1) == pytest.approx((0.1, 1e-3, 0.0)), "unknown servers are believed to be like the others"
    for tokens in range(100, 4100, 100):
        speeds.observe(1, tokens, 0, 1e-4 * tokens + 0.01)
    assert speeds.line(1) == pytest.approx((0.01, 1e-4, 0.0)) and speeds.line(0) == pytest.approx((0.1, 1e-3, 0.0))
    assert speeds.prefills_s([0, 1], 1000, [400, 0]) == pytest.approx([0.7, 0.11])
    speeds.forget(1)
    assert speeds.line(1) != pytest.approx((0.01, 1e-4, 0.0))
    speeds.observe(2, 0, 0, 0.0)
    speeds.observe(2, 100, 100, 0.0)  # Fully cached.


def test_long_prompts_teach_what_attention_costs() -> None:
    """The cost model's curve is found again from what it would take, with a tenth of error and some short prompts."""
    dice = np.random.default_rng(5)
    speeds = LearnedSpeeds()
    for tokens in np.exp(dice.normal(8.7, 1.2, 400)).clip(100, 120_000).tolist():
        held = int(tokens * dice.choice([0.0, 0.0, 0.5]))
        speeds.observe(0, int(tokens), held, LLAMA_70B_8xA800.prefill_s(tokens, held) * dice.normal(1.0, 0.1))
    for tokens, held in ((1_000, 0), (10_000, 5_000), (60_000, 0)):
        expected = LLAMA_70B_8xA800.prefill_s(tokens, held)
        assert speeds.prefills_s([0], tokens, [held])[0] == pytest.approx(expected, rel=0.25), (tokens, held)


def test_a_server_that_slows_down_is_noticed() -> None:
    speeds = LearnedSpeeds()
    dice = np.random.default_rng(4)
    for per_token_s in (1e-4, 1e-3):
        for tokens in dice.uniform(100, 4000, 40).tolist():
            speeds.observe(0, int(tokens), 0, per_token_s * tokens)
    assert speeds.line(0)[1] == pytest.approx(1e-3, rel=0.05)


def test_a_given_cost_is_asked_once_per_match() -> None:
    speeds = GivenSpeeds(LLAMA_70B_8xA800)
    seconds = speeds.prefills_s([4, 5, 6], 10_000, [0, 9_000, 0])
    assert seconds == [LLAMA_70B_8xA800.prefill_s(10_000, held) for held in (0, 9_000, 0)]
    assert speeds.prefills_s([4, 5], 0, [0, 0]) == [0.0, 0.0]


def test_a_given_cost_that_is_off_is_set_right_server_by_server() -> None:
    speeds = GivenSpeeds(LLAMA_70B_8xA800)
    dice = np.random.default_rng(7)
    for _ in range(20):
        for slot, factor in ((0, 2.0), (1, 0.5)):
            tokens = int(dice.integers(200, 20_000))
            speeds.observe(slot, tokens, 0, factor * LLAMA_70B_8xA800.prefill_s(tokens) * dice.normal(1.0, 0.1))
    expected = LLAMA_70B_8xA800.prefill_s(10_000, 4_000)
    seconds = speeds.prefills_s([0, 1, 2], 10_000, [4_000] * 3)
    assert seconds == [pytest.approx(2 * expected, rel=0.1), pytest.approx(expected / 2, rel=0.1), expected]
    speeds.forget(0)
    assert speeds.prefills_s([0], 10_000, [4_000]) == [expected]


def test_servers_that_are_alike_tie_whatever_chance_made_of_them() -> None:
    speeds = GivenSpeeds(LLAMA_70B_8xA800)
    dice = np.random.default_rng(8)
    for count in range(400):
        slot, tokens = count % 5, int(dice.integers(200, 20_000))
        slow = 1.5 if slot == 4 else 1.02
        speeds.observe(slot, tokens, 0, slow * LLAMA_70B_8xA800.prefill_s(tokens) * dice.normal(1.0, 0.02))
    *alike, slower = speeds.prefills_s(range(5), 10_000, [0] * 5)
    expected = LLAMA_70B_8xA800.prefill_s(10_000)
    assert alike == [alike[0]] * 4
    assert alike[0] == pytest.approx(1.02 * expected, rel=0.01)
    assert slower == pytest.approx(1.5 * expected, rel=0.02)


def test_notes_are_taken_once_in_order_and_forgotten_by_server() -> None:
    one, other = list(a_fleet(2))
    notes: RequestNotes[str] = RequestNotes()
    request = a_request((1, 1))
    for note in ("first", "second"):
        notes.add(request, one, note)
    notes.add(request, other, "elsewhere")
    notes.add(a_request((1, 1)), one, "an equal request")
    assert notes.take(request, one) == "first"
    notes.forget(other)
    assert notes.take(request, other) is None
    assert notes.take(request, one) == "second" and notes.take(request, one) is None and len(notes) == 1


def test_a_threshold_on_length_on_ratio_or_on_both() -> None:
    assert not GainThreshold().worth(0, 100) and GainThreshold().worth(1, 100_000)
    assert not GainThreshold(tokens=64).worth(64, 100) and GainThreshold(tokens=64).worth(65, 10_000)
    assert not GainThreshold(ratio=0.3).worth(30, 100) and GainThreshold(ratio=0.3).worth(31, 100)
    both = GainThreshold(tokens=64, ratio=0.3)
    assert not both.worth(50, 100) and not both.worth(100, 1000) and both.worth(400, 1000)
    assert "50 of 100 tokens, is not over the threshold of 64 tokens and 30% of the prompt" in both.why_not(50, 100)
    assert "nothing of the prompt's 7" in both.why_not(0, 7) and "empty" in both.why_not(0, 0)
    for wrong in ({"tokens": -1}, {"ratio": 1.0}, {"ratio": -0.1}):
        with pytest.raises(InvalidInput):
            GainThreshold(**wrong)  # type: ignore[arg-type]


def test_loads_and_the_bound_over_their_mean() -> None:
    servers = list(a_fleet(3))
    servers[0].in_flight, servers[1].in_flight = 4, 1
    servers[1].reported = ReportedLoad(at_s=0.0, waiting=2, running=5)
    assert loads_of(servers, 1.0) == [4.0, 7.0, 0.0] and loads_of(servers, 9.0) == [4.0, 1.0, 0.0]
    assert load_bound([0.0] * 8, 1.25) == 1 and load_bound([1.0, 0.0, 0.0, 0.0], 1.25) == 1
    assert load_bound([4.0, 4.0], 1.25) == 6
