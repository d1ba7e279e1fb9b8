"""The 8-bit codecs: size from the layout, loss within the step, garbage refused, and a model that still works."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("optimum.quanto")
pytest.importorskip("hqq")

from skymemory import KVCManager  # noqa: E402
from skymemory.engine.doctor import logit_distance, measure_logit_distance, next_token_logits  # noqa: E402
from skymemory.engine.transformers import quantizers  # noqa: E402
from skymemory.engine.transformers.kv_cache import TORCH_DTYPES  # noqa: E402
from skymemory.engine.transformers.quantizers import codec_of, readable_codecs  # noqa: E402
from skymemory.errors import CodecUnavailable, InvalidInput, MalformedPacket  # noqa: E402
from skymemory.kv.block import KVLayout  # noqa: E402
from skymemory.kv.codec.codec_base import measure  # noqa: E402
from skymemory.store.memory import MemoryStore  # noqa: E402

pytestmark = pytest.mark.engine
LOSSY = ["quanto8", "hqq8"]
OVERHEAD = {"quanto8": 4, "hqq8": 8}  # bytes per row of head_dim numbers


def block(layout: KVLayout, seed: int = 0, scale: float = 3.0) -> bytes:
    numbers = torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(TORCH_DTYPES[layout.dtype]).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_size_and_loss_are_as_stated(name: str, dtype: str, head_dim: int) -> None:
    layout = KVLayout(2, 3, head_dim, 5, dtype)
    report = measure(codec_of(name), block(layout), layout)
    rows = 2 * 2 * 3 * 5
    assert report.size_bytes == rows * (head_dim + OVERHEAD[name])
    # Half a step of 1/127 of the largest number in a row, and the rounding of the result.
    assert 0 < report.max_abs_error < 3.0 * 5 / 127
    assert report.rms_error < report.max_abs_error / 2


@pytest.mark.parametrize("name", LOSSY)
def test_rows_of_zeros_and_constants_come_back(name: str) -> None:
    layout = KVLayout(1, 1, 16, 4, "bfloat16")
    for number in (0.0, 1.0, -2.5):
        raw = torch.full(layout.shape, number, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        assert measure(codec_of(name), raw, layout).max_abs_error <= abs(number) / 127


@pytest.mark.parametrize("name", LOSSY)
def test_an_outlier_spoils_its_own_row_only(name: str) -> None:
    layout = KVLayout(1, 1, 16, 4, "float32")
    numbers = torch.frombuffer(bytearray(block(layout, scale=1.0)), dtype=torch.float32).view(8, 16).clone()
    numbers[3, 0] = 1e4
    raw = numbers.view(torch.uint8).numpy().tobytes()
    out = bytearray(layout.block_bytes)
    codec = codec_of(name)
    codec.decode(codec.encode(memoryview(raw), layout), layout, memoryview(out))
    error = (torch.frombuffer(out, dtype=torch.float32).view(8, 16) - numbers).abs().amax(dim=1)
    assert error[torch.arange(8) != 3].max() < 0.05


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(name: str, number: float) -> None:
    layout = KVLayout(1, 1, 16, 4, "float32")
    numbers = np.zeros(layout.shape, np.float32)
    numbers[0, 1, 0, 2, 3] = number
    with pytest.raises(InvalidInput, match="finite"):
        codec_of(name).encode(memoryview(numbers.tobytes()), layout)


@pytest.mark.parametrize("name", LOSSY)
def test_garbage_is_malformed(name: str) -> None:
    layout = KVLayout(1, 1, 16, 4, "float32")
    codec, out = codec_of(name), memoryview(bytearray(layout.block_bytes))
    payload = codec.encode(memoryview(block(layout)), layout)
    for wrong in (b"", payload[:-1], payload + b"\0", payload[:-4] + b"\0\0\xc0\x7f"):
        with pytest.raises(MalformedPacket):
            codec.decode(wrong, layout, out)
    with pytest.raises(InvalidInput):
        codec.encode(memoryview(block(layout))[:-1], layout)
    with pytest.raises(InvalidInput):
        codec.decode(payload, layout, out[:-1])


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("optimum", "hqq")):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for cached in (quantizers._quanto, quantizers._hqq):
        cached.cache_clear()
    try:
        for name in LOSSY:
            with pytest.raises(CodecUnavailable, match=r"pip install .*\[hf\]"):
                KVCManager(model, codec=name)
        KVCManager(model, codec="raw").close()
    finally:
        for cached in (quantizers._quanto, quantizers._hqq):
            cached.cache_clear()


def test_a_lossless_manager_reads_no_lossy_block() -> None:
    assert [codec.name for codec in readable_codecs(codec_of("raw"))] == ["raw"]
    ids = {codec.codec_id for codec in readable_codecs(codec_of("hqq8"))}
    assert ids == {codec_of(name).codec_id for name in ("raw", "quanto8", "hqq8", "cachegen")}


@pytest.mark.parametrize("name", LOSSY)
def test_a_model_behind_a_lossy_codec(name: str, model: Any, tokenizer: Any, document: str) -> None:
    prompt = document[:900]
    ids = tokenizer(prompt)["input_ids"]
    with KVCManager(model, tokenizer, block_tokens=16, codec=name) as kvc:
        added = kvc.add_blocks(prompt)
        assert added.size_bytes < 0.45 * added.raw_bytes
        distance = measure_logit_distance(kvc, ids)
        assert kvc.last.cached_tokens > 200
        assert 0 < distance.rms < 0.05 * distance.spread
        assert f"{distance.rms:.2g}" in distance.describe()


def test_two_lossy_managers_share_a_store(model: Any, tokenizer: Any, document: str) -> None:
    store = MemoryStore()
    with KVCManager(model, tokenizer, store, block_tokens=16, codec="quanto8") as quanto:
        blocks = quanto.add_blocks(document[:700]).blocks
    with KVCManager(model, tokenizer, store, block_tokens=16, codec="hqq8") as hqq:
        hqq.add_blocks(document[:1400])
        assert hqq.get_cache(document[:1400]).result.loaded_blocks == hqq.last_stored.blocks > blocks


def test_float32_differs_by_nothing_that_matters(model: Any, tokenizer: Any, document: str) -> None:
    ids = tokenizer(document[:700])["input_ids"]
    with KVCManager(model, tokenizer, block_tokens=16) as kvc:
        kvc.add_blocks_ids(ids)
        distance = measure_logit_distance(kvc, ids)
        assert distance.max_abs < 1e-4 and distance.same_choice
    same = logit_distance(next_token_logits(model, ids), next_token_logits(model, ids))
    assert same.max_abs == 0.0 and same.rms == 0.0
