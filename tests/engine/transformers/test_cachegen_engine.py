"""The cachegen codec behind a model: chosen by name, smaller than eight bits, read by every lossy manager."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("constriction")

from skymemory import KVCManager
from skymemory.engine.doctor import measure_logit_distance
from skymemory.errors import CodecUnavailable
from skymemory.kv.codec import entropy
from skymemory.store.memory import MemoryStore

pytestmark = pytest.mark.engine


def test_finer_levels_are_nearer_and_larger(model: Any, tokenizer: Any, document: str) -> None:
    prompt = document[:2400]
    ids = tokenizer(prompt)["input_ids"]
    sizes, distances = [], []
    for name in ("cachegen-finest", "cachegen-fine", "cachegen", "cachegen-coarse"):
        with KVCManager(model, tokenizer, block_tokens=128, codec=name) as kvc:
            added = kvc.add_blocks(prompt)
            sizes.append(added.size_bytes / added.raw_bytes)
            distance = measure_logit_distance(kvc, ids)
            assert kvc.last.cached_tokens >= 384
            distances.append(distance.rms / distance.spread)
    assert sizes == sorted(sizes, reverse=True)
    assert distances[0] < distances[1] < min(distances[2:])
    assert sizes[2] < 0.1, "float32 in about 2.6 bits"
    assert 0 < distances[0] < 0.05


def test_every_lossy_manager_reads_what_it_wrote(model: Any, tokenizer: Any, document: str) -> None:
    store = MemoryStore()
    with KVCManager(model, tokenizer, store, block_tokens=64, codec="cachegen-coarse") as coarse:
        blocks = coarse.add_blocks(document[:1400]).blocks
    assert blocks
    for name in ("cachegen", "quanto8"):
        with KVCManager(model, tokenizer, store, block_tokens=64, codec=name) as other:
            assert other.get_cache(document[:1400]).result.loaded_blocks == blocks
    with KVCManager(model, tokenizer, store, block_tokens=64) as lossless:
        assert lossless.get_cache(document[:1400]).result.loaded_blocks == 0


def test_a_missing_library_is_named_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "constriction":
            raise ImportError("No module named 'constriction'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    entropy.constriction.cache_clear()
    with pytest.raises(CodecUnavailable, match=r"pip install .*\[cachegen\]"):
        KVCManager(model, codec="cachegen")
