"""What lies behind the GPU's memory is neither computed nor free: it is loaded, and that takes time."""

from __future__ import annotations

import numpy as np
import pytest
from tests.conductor.strategies.fleets import a_fleet

from skymemory import native
from skymemory.conductor.picker import Picker
from skymemory.conductor.prefix_index.events import BlocksRemoved, BlocksStored
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.request import Prompt, Request, seed
from skymemory.conductor.strategies.least_ttft import LeastTtft, LeastTtftSettings
from skymemory.conductor.strategies.registry import named
from skymemory.conductor.strategies.weighted import Precise
from skymemory.errors import InvalidInput

BLOCK = 16
BLOCKS = 40


class MillisecondPerToken:
    def prefill_s(self, tokens: float, cached: float = 0) -> float:
        return max(1.0, tokens - cached) * 1e-3


def tokens_of(text: int, blocks: int = BLOCKS) -> list[int]:
    return np.random.default_rng(text).integers(0, 1000, blocks * BLOCK).tolist()


def asked(text: int, more_blocks: int = 10) -> Request:
    """A prompt that begins with the 40 blocks of ``text``; what follows is unique."""
    tokens = np.array(tokens_of(text) + tokens_of(1000 + text, more_blocks), dtype="<u4")
    blocks = native.chain_hashes(tokens.tobytes(), 4 * BLOCK, seed("m", "", ""))
    return Request(Prompt(blocks, blocks, BLOCK, len(tokens)), streams=True)


def feed(index: PreciseIndex, slot: int, text: int, medium: str, blocks: int = BLOCKS) -> None:
    names = [1000 * text + at for at in range(blocks)]
    index.take(slot, BlocksStored(names, None, tokens_of(text, BLOCKS)[: blocks * BLOCK], BLOCK, medium))


def a_picker(**settings: float) -> tuple[Picker, PreciseIndex]:
    index = PreciseIndex(BLOCK)
    options = LeastTtftSettings(delay_weight=0.0, **settings)  # type: ignore[arg-type]
    picker = Picker(a_fleet(3), LeastTtft(index, options, MillisecondPerToken()), seed=1)
    for slot in range(3):
        index.follow(slot, "m")
    return picker, index


def ttft_s(picker: Picker, server: str, text: int, now_s: float = 0.0) -> float:
    estimate = picker.pick(asked(text), now_s, {server}).estimated_ttft_s
    assert estimate is not None
    return estimate


def test_of_equal_matches_the_nearest_medium_wins_and_each_costs_its_loading() -> None:
    picker, index = a_picker()
    feed(index, 0, 1, "STORAGE")
    feed(index, 1, 1, "cpu")
    assert picker.pick(asked(1), 0.0).server == "s1"
    # 640 of 800 tokens are held: 160 ms of computing, and a fifth or three quarters of the other 640.
    assert ttft_s(picker, "s1", 1) == pytest.approx(0.160 + 0.128)
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.160 + 0.480)
    feed(index, 2, 1, "GPU", 30)
    assert picker.pick(asked(1), 0.0).server == "s1", "ten blocks more to compute are worse than 40 to load"
    feed(index, 0, 1, "GPU", 38)
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.160 + 0.024) and picker.pick(asked(1), 0.0).server == "s0"
    decision = picker.pick(asked(1), 0.0)
    assert decision.matched_tokens == 640 and "of them saved 616" in decision.reasons


def test_seconds_of_loading_are_added_where_they_are_known() -> None:
    picker, index = a_picker(disk_load_s=0.001, remote_load_s=0.1)
    feed(index, 0, 1, "disk")
    feed(index, 1, 1, "remote")
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.160 + 0.040)
    assert ttft_s(picker, "s1", 1) == pytest.approx(0.160 + 4.0), "such a link is worse than computing"
    assert ttft_s(picker, "s2", 1) == pytest.approx(0.800)
    assert [picker.pick(asked(1), 0.0, {"s1", "s2"}).server] == ["s2"]
    picker.routed(picker.pick(asked(1), 0.0, {"s0"}), 0.0)
    assert ttft_s(picker, "s0", 2) == pytest.approx(0.200 + 0.800), "the loading of others is waited for, too"


def test_a_medium_of_unknown_name_saves_nothing() -> None:
    picker, index = a_picker(cpu_load_s=1e-6)
    feed(index, 0, 1, "tape")
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.800)
    feed(index, 0, 1, "cpu", 20)
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.480 + 20e-6)


def test_what_a_prompt_under_way_loads_is_loaded_once() -> None:
    picker, index = a_picker()
    feed(index, 0, 1, "disk")
    sent = picker.pick(asked(1), 0.0, {"s0"})
    picker.routed(sent, 0.0)
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.640 + 0.001), "all of it is there by then, but for a token"
    picker.failed(sent, 0.0)
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.640)
    index.take(0, BlocksRemoved([1000 + at for at in range(BLOCKS)], "DISK"))
    assert ttft_s(picker, "s0", 1) == pytest.approx(0.800)


@pytest.mark.parametrize("evicted", [False, True])
def test_loading_does_not_teach_what_computing_takes(evicted: bool) -> None:
    """A server computes a token in 1 ms and loads a block in 12 ms: a prompt that it holds nothing of takes 0.8 s."""
    index = PreciseIndex(BLOCK)
    index.follow(0, "m")
    settings = LeastTtftSettings(delay_weight=0.0, cpu_load_s=0.012)
    scorer = LeastTtft(index, settings)
    picker = Picker(a_fleet(1), scorer, seed=1)
    now_s = 0.0
    dice = np.random.default_rng(5)
    for text in range(1, 40):
        loaded, more = int(dice.integers(0, BLOCKS)), int(dice.integers(4, 60))
        feed(index, 0, text, "cpu", loaded)
        decision = picker.pick(asked(text, more), now_s)
        picker.routed(decision, now_s)
        had = 0 if evicted else loaded
        now_s += 0.001 * BLOCK * (BLOCKS - had + more) + 0.012 * had
        picker.succeeded(decision, now_s, had * BLOCK if evicted or text % 2 else None)
        picker.on_request_end(decision, now_s)
    (seconds,) = scorer.speeds.prefills_s([0], 800, [0])
    assert seconds == pytest.approx(0.800, rel=0.02)


def test_settings_of_media_reach_the_strategies_by_name() -> None:
    scorer = named("precise", cpu_weight="0.25", block_tokens=BLOCK)
    assert isinstance(scorer, Precise) and isinstance(scorer.index, PreciseIndex)
    scorer.index.follow(0, "m")
    feed(scorer.index, 0, 1, "cpu")
    assert scorer.index.weighted(asked(1).prompt.blocks, [0]) == pytest.approx([10.0])
    with pytest.raises(InvalidInput, match="disk_weight is -1"):
        named("precise", disk_weight=-1)
    with pytest.raises(InvalidInput, match="remote_load_s is -1"):
        named("least-ttft", remote_load_s=-1)
