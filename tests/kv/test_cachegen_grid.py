"""Where cachegen's grids lie, what their cells are read back as, and keys turned back to before their positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from tests.kv.cachegen_steps import steps_in

from skymemory.kv.block import KVLayout
from skymemory.kv.codec.cachegen import BASES, CacheGen, best_base, turn
from skymemory.kv.codec.entropy import MAX_PULL, Snapped, pack, packed_bytes, snap, unpack, unsnap

LLAMA = 1


def gaussian(step: float, *, channels: int = 64, tokens: int = 256) -> npt.NDArray[np.float32]:
    """Numbers of deviation 1 about any mean, in steps of ``step`` deviations."""
    dice = np.random.default_rng(4)
    numbers = dice.standard_normal((channels, tokens)) + dice.uniform(-9, 9, (channels, 1))
    return (numbers / step).astype(np.float32)


@pytest.mark.parametrize("step", [0.1, 1.0, 3.0])
def test_a_channels_mean_is_a_point_of_its_grid_to_a_sixteenth(step: float) -> None:
    scaled = gaussian(step)
    snapped = snap(scaled)
    means = scaled.mean(axis=1, dtype=np.float64) - snapped.phases / 8
    assert np.abs(means - np.rint(means)).max() < 1 / 16 + 1e-6
    assert np.abs(unsnap(snapped) - scaled).max() <= 0.5 + MAX_PULL / 64 + 1e-6
    assert np.abs(snapped.quotients + snapped.phases[:, None] / 8 - scaled).max() <= 0.5 + 1e-6


def test_coarse_cells_are_read_back_nearer_to_the_mean_and_fine_ones_in_their_middle() -> None:
    fine, coarse = snap(gaussian(0.05)), snap(gaussian(2.0))
    assert fine.pull <= 1 < coarse.pull <= MAX_PULL
    scaled, middle = gaussian(2.0), Snapped(coarse.quotients, coarse.phases, 0)
    errors = [float(np.square(unsnap(each) - scaled).mean()) for each in (coarse, middle)]
    assert errors[0] < 0.85 * errors[1], "a step of two deviations: a fifth less"
    one_more = [Snapped(coarse.quotients, coarse.phases, coarse.pull + by) for by in (-2, 2)]
    assert all(float(np.square(unsnap(each) - scaled).mean()) > errors[0] for each in one_more), "the best pull"


def test_phases_are_packed_in_three_bits() -> None:
    for channels in (1, 2, 3, 8, 9, 127):
        phases = np.random.default_rng(channels).integers(0, 8, channels).astype(np.uint8)
        packed = pack(phases)
        assert len(packed) == packed_bytes(channels) == -(-channels * 3 // 8)
        assert (unpack(memoryview(packed), channels) == phases).all()
    assert pack(np.array([1, 2, 7], np.uint8)) == bytes([0b00101011, 0b10000000])


@pytest.mark.parametrize("base", range(1, len(BASES)))
def test_turning_there_and_back_is_nothing_and_keeps_lengths(base: int) -> None:
    keys = np.random.default_rng(1).standard_normal((2, 50, 16)).astype(np.float32)
    turned = turn(keys, base, 1)
    assert np.abs(turn(turned, base, -1) - keys).max() < 1e-5
    assert np.allclose(np.square(turned).sum(-1), np.square(keys).sum(-1), rtol=1e-5)
    assert np.array_equal(turned[:, 0], keys[:, 0]) and not np.allclose(turned[:, 1], keys[:, 1])


@pytest.mark.parametrize("base", range(1, len(BASES)))
def test_the_base_a_model_used_is_found_wherever_the_block_lies(base: int) -> None:
    dice = np.random.default_rng(2)
    keys = dice.standard_normal((2, 128, 64)) + dice.normal(0, 2, (2, 1, 64))
    rates = BASES[base] ** (-np.arange(32) / 32)
    angles = (np.arange(128)[:, None] + 5 * 128) * rates
    first, second = keys[..., :32], keys[..., 32:]
    cosines, sines = np.cos(angles), np.sin(angles)
    turned = np.concatenate((first * cosines - second * sines, second * cosines + first * sines), -1)
    assert best_base(turned.astype(np.float32)) == base
    assert best_base(keys.astype(np.float32)) == 0, "not turned, nothing to turn back"
    assert best_base(keys[..., :63].astype(np.float32)) == 0, "channels without a partner"


def test_it_is_transformers_own_turning() -> None:
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    keys = torch.randn(1, 2, 30, 32)
    cosines, sines = llama.LlamaRotaryEmbedding(config)(keys, torch.arange(30)[None])
    wanted = llama.apply_rotary_pos_emb(keys, keys, cosines, sines)[1][0].numpy()
    assert np.abs(turn(keys[0].numpy(), LLAMA, 1) - wanted).max() < 1e-5


def test_turned_keys_with_means_take_fewer_bits_for_the_same_error() -> None:
    pytest.importorskip("constriction")
    layout = KVLayout(3, 2, 64, 128, "float32")
    dice = np.random.default_rng(3)
    plain = dice.standard_normal(layout.shape) + dice.normal(0, 2, (3, 2, 2, 1, 64))
    turned = plain.copy()
    for layer in range(3):
        turned[layer, 0] = turn(plain[layer, 0].astype(np.float32), LLAMA, 1)
    sizes, errors = [], []
    for numbers in (plain, turned):
        raw = numbers.astype("<f4")
        payload = CacheGen("medium").encode(memoryview(raw.tobytes()), layout)
        out = bytearray(layout.block_bytes)
        CacheGen().decode(payload, layout, memoryview(out))
        sizes.append(len(payload))
        errors.append(float(np.square(np.frombuffer(out, "<f4") - raw.ravel()).mean()))
        steps = steps_in(payload, layout)
    assert abs(sizes[1] - sizes[0]) < 0.01 * sizes[0] and errors[1] == pytest.approx(errors[0], rel=0.05)
    assert (steps > 0).all()
