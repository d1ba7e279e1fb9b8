"""What the model and machine of the Mooncake paper cost, against figures that were computed by hand or published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skymemory.conductor.cost_model import (
    EIGHT_A800,
    LLAMA_70B,
    CostModel,
    Machine,
    Medium,
    loaded_s,
    network_of,
    pipelined_s,
    stored_s,
)
from skymemory.conductor.cost_model import LLAMA_70B_8xA800 as PAPER
from skymemory.errors import InvalidInput


def test_kv_of_a_token_and_of_a_block() -> None:
    assert PAPER.kv_bytes(1) == 320 * 1024
    assert PAPER.kv_bytes(512) == 160 * 2**20


def test_a_prefill_by_hand() -> None:
    # 80 · (4 · 1000² · 8192 + 22 · 1000 · 8192²) = 1.2073e14 operations, at 1.248e15 a second.
    assert PAPER.prefill_flops(1000) == pytest.approx(80 * (4 * 1e6 * 8192 + 22 * 1e3 * 8192**2))
    assert PAPER.prefill_s(1000) == pytest.approx(0.09674, rel=1e-3)
    assert PAPER.at(0.25).prefill_s(1000) == pytest.approx(2 * PAPER.prefill_s(1000))
    assert PAPER.at(0.5, fixed_s=0.02).prefill_s(1000) == pytest.approx(0.02 + PAPER.prefill_s(1000))


def test_a_cached_prefix_saves_what_the_paper_says() -> None:
    tokens = 128_000
    saved = 1 - PAPER.prefill_s(tokens, tokens * 95 // 100) / PAPER.prefill_s(tokens)
    assert saved == pytest.approx(0.92, abs=0.01) and saved == pytest.approx(0.9149, abs=1e-4)


def test_computing_in_two_parts_costs_as_much_as_in_one() -> None:
    assert PAPER.prefill_flops(9_000) == pytest.approx(PAPER.prefill_flops(4_000) + PAPER.prefill_flops(9_000, 4_000))


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    assert PAPER.prefill_flops(512, 512) == PAPER.prefill_flops(512, 511) > 0
    assert PAPER.prefill_flops(512, 9_999) == PAPER.prefill_flops(512, 511)
    assert PAPER.prefill_flops(512, -3) == PAPER.prefill_flops(512)


@pytest.mark.parametrize(("mfu", "fixed_s"), [(0.0, 0.0), (1.2, 0.0), (0.5, -1.0)])
def test_refuses_what_no_machine_does(mfu: float, fixed_s: float) -> None:
    with pytest.raises(InvalidInput):
        PAPER.at(mfu, fixed_s)


def test_a_decoding_step_by_hand() -> None:
    # 140 GB of weights at 16 TB/s, and 320 KiB for each token that is looked at.
    assert PAPER.decode_step_s(1, 0) == pytest.approx(140e9 / 16e12)
    assert PAPER.decode_step_s(8, 80_000) == pytest.approx((140e9 + 80_000 * 327_680) / 16e12)
    slower = CostModel(LLAMA_70B, EIGHT_A800, mfu=0.5, decode_fixed_s=0.005, memory_share=0.5)
    assert slower.decode_step_s(8, 80_000) == pytest.approx(0.005 + 2 * PAPER.decode_step_s(8, 80_000))
    # Many short contexts: 80 · 22 · 8192² operations for each outweigh the weights' reading.
    assert PAPER.decode_step_s(512, 512) == pytest.approx(
        (512 * 80 * 22 * 8192**2 + 2 * 80 * 4 * 8192 * 512) / (2.496e15 / 2)
    )


def test_what_is_not_computing_is_counted_too() -> None:
    """Tokens that are cached take a little each, requests of a batch too: engines do more than multiply."""
    cost = replace(PAPER, cached_token_s=1e-5, decode_request_s=1e-3)
    assert cost.prefill_s(1000, 600) == pytest.approx(PAPER.prefill_s(1000, 600) + 600e-5)
    assert cost.prefill_s(1000) == PAPER.prefill_s(1000)
    assert cost.decode_step_s(8, 80_000) == pytest.approx(PAPER.decode_step_s(8, 80_000) + 8e-3)
    with pytest.raises(InvalidInput):
        replace(PAPER, cached_token_s=-1e-9)


def test_what_layer_by_layer_hides() -> None:
    # Of 80 layers: a transfer as long as the computing shows its last layer, and one layer's computing that is missing.
    assert stored_s(1.0, 1.0, 80) == pytest.approx(1 / 80 + 1 / 80)
    assert stored_s(0.1, 1.0, 80) == pytest.approx(0.1 / 80)
    assert stored_s(3.0, 1.0, 1) == pytest.approx(6.0)
    assert loaded_s(2.0, 0.5, 10) == pytest.approx(2.05) and loaded_s(0.5, 2.0, 10) == pytest.approx(2.05)


def test_a_pipeline_ends_with_the_last_machine_on_the_longest_chunk() -> None:
    assert pipelined_s([2.0, 3.0, 1.0], 1) == 6.0
    assert pipelined_s([2.0, 3.0, 1.0], 3) == 12.0
    assert pipelined_s([], 4) == 0.0


def test_transfers_take_their_latency_and_their_bytes() -> None:
    medium = Medium("far", 1e9, 0.02)
    assert medium.seconds(5e8) == pytest.approx(0.52) and medium.seconds(0) == 0.0
    assert network_of(PAPER).bytes_per_s == 100e9
    for bad in (lambda: Medium("m", 0.0), lambda: Medium("m", 1.0, -1.0), lambda: Machine("m", 1.0, 0.0, 1.0)):
        with pytest.raises(InvalidInput):
            bad()


def test_reuse_pays_from_the_rate_that_the_paper_names() -> None:
    """8k tokens on eight A800 at full speed: 6 GB/s (FAST'25 §2). Above it loading is faster than computing."""
    full = PAPER.at(1.0)
    assert full.kv_bytes(8192) / full.prefill_s(8192) == pytest.approx(6e9, rel=0.03)
