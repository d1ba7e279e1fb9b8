"""What the model and machine of the Mooncake paper cost, against figures that were computed by hand or published."""

from __future__ import annotations

import pytest

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
