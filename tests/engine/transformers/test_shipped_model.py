"""The trained model that the package ships: what it is, that it has learnt something, and that caching changes none of
its words.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from skymemory.engine.inputs import MODEL_NAMES, check_model, shipped_document, small_model_folder  # noqa: E402
from skymemory.engine.transformers.huggingface import KVCManager  # noqa: E402
from skymemory.engine.transformers.models import ReadyModel, ready_model  # noqa: E402
from skymemory.errors import InvalidInput  # noqa: E402

pytestmark = pytest.mark.engine

CONTEXT_TOKENS, NEW_TOKENS = 4 * 128 + 12, 30


@pytest.fixture(scope="module")
def exact() -> ReadyModel:
    return ready_model("small", dtype="float32")


def test_it_is_small_and_says_where_it_comes_from() -> None:
    ready = ready_model("small")
    assert 5_000_000 < sum(parameter.numel() for parameter in ready.model.parameters()) < 12_000_000
    assert ready.model.dtype == torch.bfloat16 and not ready.model.training
    assert ready.model.config.max_position_embeddings >= 2048
    assert sum(file.stat().st_size for file in small_model_folder().iterdir()) < 25_000_000
    origin = (small_model_folder() / "ORIGIN.txt").read_text()
    assert "python3.11-doc" in origin and "PSF-2.0" in origin and "bits per byte" in origin
    assert json.loads((small_model_folder() / "training.json").read_text())["held_out"]["bits_per_byte"] <= 1.5


def test_its_tokenizer_says_every_text_with_the_ids_the_model_has(exact: ReadyModel) -> None:
    assert len(exact.tokenizer) == exact.model.config.vocab_size == 8192
    for text in (shipped_document(), "naïve ☂ 漢字 \x01", "", "\n\n  two"):
        ids = exact.tokenizer(text)["input_ids"]
        assert ids[0] == exact.tokenizer.bos_token_id and max(ids) < 8192
        assert exact.tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(shipped_document()) / len(exact.tokenizer(shipped_document())["input_ids"]) > 3


@torch.inference_mode()
def test_it_predicts_english_it_never_saw(exact: ReadyModel) -> None:
    ids = exact.tokenizer(shipped_document(), return_tensors="pt").input_ids[:, :1025]
    logits = exact.model(ids[:, :-1]).logits[0]
    nats = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    text = exact.tokenizer.decode(ids[0], skip_special_tokens=True)
    # A tale, found in no manual. Random weights say log2(8192) = 13 bits per token, 3.8 per byte.
    assert nats / math.log(2) / len(text.encode()) < 2.5


@pytest.mark.brief()
def test_greedy_tokens_are_the_same_with_and_without_the_cache(exact: ReadyModel) -> None:
    ids = exact.tokenizer(shipped_document(), return_tensors="pt").input_ids[:, :CONTEXT_TOKENS]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    options["attention_mask"] = torch.ones_like(ids)
    plain = exact.model.generate(ids, **options)
    with KVCManager(exact.model, exact.tokenizer) as kvc:
        kvc.add_blocks_ids(ids)
        cached = exact.model.generate(ids, past_key_values=kvc.get_cache_ids(ids), **options)
        assert kvc.last.cached_tokens == 512
    assert torch.equal(plain, cached) and plain.shape[1] == CONTEXT_TOKENS + NEW_TOKENS
    assert len(set(plain[0, CONTEXT_TOKENS:].tolist())) > 5


def test_a_name_is_ours_or_a_folder_or_refused(tmp_path: Path, exact: ReadyModel) -> None:
    for name in MODEL_NAMES:
        check_model(name)
    random = ready_model("small-random", seed=3, dtype="float32")
    assert len(random.tokenizer) == random.model.config.vocab_size == 1024
    exact.model.save_pretrained(tmp_path)
    exact.tokenizer.save_pretrained(tmp_path)
    check_model(str(tmp_path))
    assert ready_model(str(tmp_path), dtype="float32").words == str(tmp_path)
    for function in (check_model, ready_model):
        with pytest.raises(InvalidInput, match="no model"):
            function("large")
