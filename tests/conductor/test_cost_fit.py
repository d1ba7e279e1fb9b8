"""Cost models fitted to measurements: what made the numbers comes out again, noise and outliers or not; files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skymemory.conductor.cost_fit import (
    DecodePoint,
    PrefillPoint,
    decode_errors,
    dump,
    errors,
    fit_decode,
    fit_prefill,
    parse,
    prefill_errors,
)
from skymemory.conductor.cost_model import (
    EIGHT_A800,
    LLAMA_70B,
    CostModel,
    LLAMA_70B_8xA800,
    Machine,
    ModelShape,
    shape_of,
)
from skymemory.errors import InvalidInput
from skymemory.router.settings import read_cost

SMALL = ModelShape("small", layers=6, width=256, kv_heads=2, head_dim=64, value_bytes=4, weight_flops=20.0)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
HELD_OUT = (96, 192, 384, 768, 1536, 3072)
SHARES = (0.0, 0.5, 0.9)


def points_of(cost: CostModel, lengths: tuple[int, ...], noise: float = 0.0, seed: int = 0) -> list[PrefillPoint]:
    dice = random.Random(seed)
    return [
        PrefillPoint(n, int(n * share), cost.prefill_s(n, int(n * share)) * dice.lognormvariate(0, noise))
        for n in lengths
        for share in SHARES
    ]


@settings(max_examples=40, deadline=None)
@given(
    gflops=st.floats(1, 1e5),
    attention=st.floats(0, 400),
    fixed_s=st.floats(0, 0.05),
    cached_s=st.floats(0, 1e-5),
)
@example(gflops=80876.0, attention=0.0, fixed_s=0.0, cached_s=6.975703862186479e-06)
def test_what_made_the_times_comes_out_again(gflops: float, attention: float, fixed_s: float, cached_s: float) -> None:
    """Whatever the engine's parts are: lengths it was not fitted on come out to a thousandth.

    Also where a cached token takes longer than one that is computed, as from a slow store: 72 times in the example.
    """
    machine = Machine("m", gflops * 1e9, 1e10, 1e9)
    truth = CostModel(replace(SMALL, attention_flops=attention), machine, 1.0, fixed_s=fixed_s, cached_token_s=cached_s)
    fitted = fit_prefill(points_of(truth, LENGTHS), SMALL)
    assert prefill_errors(fitted, points_of(truth, HELD_OUT)).worst < 1e-3


def test_the_parts_are_separated() -> None:
    truth = CostModel(
        replace(SMALL, attention_flops=9.0), Machine("m", 8e10, 1e10, 1e9), 0.4, fixed_s=0.004, cached_token_s=2e-6
    )
    found = fit_prefill(points_of(truth, LENGTHS), SMALL, truth.machine)
    assert found.mfu == pytest.approx(0.4, rel=1e-3)
    assert found.fixed_s == pytest.approx(0.004, rel=1e-3)
    assert found.cached_token_s == pytest.approx(2e-6, rel=1e-2)
    assert found.shape.attention_flops == pytest.approx(9.0, rel=1e-2)
    assert found.machine == truth.machine


def test_the_preset_comes_out_of_its_own_times() -> None:
    found = fit_prefill(points_of(LLAMA_70B_8xA800, (1024, 4096, 16384, 65536)), LLAMA_70B, EIGHT_A800)
    assert found.mfu == pytest.approx(0.5, rel=1e-3)
    assert found.shape.attention_flops == pytest.approx(4.0, rel=1e-2)


def test_noise_and_a_few_ruined_measurements_do_not_ruin_the_fit() -> None:
    truth = CostModel(SMALL, Machine("m", 4e10, 1e10, 1e9), 1.0, fixed_s=0.003)
    points = points_of(truth, LENGTHS, noise=0.03, seed=5)
    for at in (3, 11):
        points[at] = replace(points[at], seconds=points[at].seconds * 3)
    assert prefill_errors(fit_prefill(points, SMALL), points_of(truth, HELD_OUT)).worst < 0.1


def steps_of(cost: CostModel, batches: tuple[int, ...], contexts: tuple[int, ...]) -> list[DecodePoint]:
    return [DecodePoint(b, b * c, cost.decode_step_s(b, b * c)) for b in batches for c in contexts]


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("memory_share", [0.3, 0.9])
@pytest.mark.parametrize("per_request_s", [0.0, 1e-4])
def test_decoding_comes_out_again(memory_share: float, per_request_s: float) -> None:
    truth = replace(LLAMA_70B_8xA800, memory_share=memory_share, decode_fixed_s=0.004, decode_request_s=per_request_s)
    known = replace(LLAMA_70B_8xA800, decode_fixed_s=0.0)
    found = fit_decode(steps_of(truth, (1, 4, 16, 64), (512, 4096, 16384)), known)
    assert decode_errors(found, steps_of(truth, (2, 8, 32), (1024, 8192))).worst < 0.02
    assert found.memory_share == pytest.approx(memory_share, rel=0.08)


@pytest.mark.brief()
def test_an_engine_whose_steps_take_so_much_a_request_is_said_to_have_such() -> None:
    """As ours: one request after the other, whatever their contexts."""
    cost = CostModel(SMALL, Machine("as measured", 4e10, 4e10, 1e9), 1.0)
    points = [DecodePoint(b, b * c, 0.001 + 0.004 * b) for b in (1, 2, 4, 8) for c in (64, 512, 2048)]
    found = fit_decode(points, cost)
    assert decode_errors(found, [DecodePoint(6, 6 * 300, 0.025)]).worst < 0.05
    assert found.decode_request_s == pytest.approx(0.004, rel=0.1)


def test_errors_are_parts_of_what_was_measured() -> None:
    found = errors([1.1, 0.9, 1.0], [1.0, 1.0, 2.0])
    assert (found.mean, found.worst, found.bias) == pytest.approx((0.7 / 3, 0.5, -0.5 / 3))


@pytest.mark.parametrize(
    ("points", "complaint"),
    [
        ([], "at least three lengths"),
        ([PrefillPoint(n, 0, 0.1) for n in (10, 10, 10)], "at least three lengths"),
        ([PrefillPoint(n, n, 0.1) for n in (10, 20, 30)], "at least three lengths"),
        ([PrefillPoint(n, 0, 1.0 / n) for n in (10, 20, 30)], "do not grow"),
    ],
)
def test_what_cannot_be_fitted_is_said(points: list[PrefillPoint], complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        fit_prefill(points, SMALL)


def test_a_machine_slower_than_what_was_measured_is_refused() -> None:
    truth = CostModel(SMALL, Machine("m", 8e10, 1e10, 1e9), 1.0)
    with pytest.raises(InvalidInput, match="more than the 1e\\+10 of slow"):
        fit_prefill(points_of(truth, LENGTHS), SMALL, Machine("slow", 1e10, 1e10, 1e9))


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    cost = replace(LLAMA_70B_8xA800, fixed_s=0.01, decode_request_s=1e-4, cached_token_s=1e-7)
    file = tmp_path / "cost.json"
    file.write_text(dump(cost, {"measured": "here"}))
    assert read_cost(file) == cost
    toml = 'format = "skymemory-cost/1"\nmfu = 0.5\n[shape]\nname = "s"\nlayers = 2\nwidth = 8\nkv_heads = 1\n'
    toml += (
        'head_dim = 4\n[machine]\nname = "m"\nflops_per_s = 1e9\nmemory_bytes_per_s = 1e9\nnetwork_bytes_per_s = 1e9'
    )
    assert parse(toml).shape.attention_flops == 4.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "other"}, "not a cost model"),
        ({"mfu": "half"}, "mfu is 'half'; expected float"),
        ({"mfu": 2.0}, "above 0, at most 1"),
        ({"mfuu": 0.5}, "unknown key 'mfuu'"),
        ({"shape": {"name": "x"}}, "shape: missing layers"),
        ({"machine": 7}, "machine: expected a table"),
    ],
)
def test_a_file_that_is_none_says_why(change: dict[str, object], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({**json.loads(dump(LLAMA_70B_8xA800)), **change}))
    with pytest.raises(InvalidInput, match=complaint) as caught:
        read_cost(file)
    assert str(file) in str(caught.value)


def test_a_shape_out_of_a_models_config() -> None:
    """LLaMA-2-70B's: 69 billion parameters, and the 320 KiB of KV per token that the paper has."""
    config = {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 32000,
        "torch_dtype": "float16",
    }
    shape = shape_of("LLaMA-2-70B", config)
    assert shape.kv_bytes_per_token == 320 << 10 == LLAMA_70B.kv_bytes_per_token
    assert shape.parameters == pytest.approx(69e9, rel=0.01)
    assert shape.weight_flops == pytest.approx(25.5, rel=0.01)
    assert shape_of("x", config, value_bytes=1).kv_bytes_per_token == 160 << 10
    with pytest.raises(InvalidInput, match=r"expected a model's config\.json"):
        shape_of("x", {"hidden_size": 5})
