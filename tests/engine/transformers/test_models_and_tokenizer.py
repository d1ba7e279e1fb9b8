"""Models from a configuration, the tokenizer from the shipped text, documents from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from skymemory.engine.inputs import read_document, shipped_document  # noqa: E402
from skymemory.engine.transformers.models import (  # noqa: E402  # noqa: E402
    SMALL_SHAPE,
    TINYLLAMA_SHAPE,
    build_llama,
    build_small,
    load_model,
    load_tokenizer,
    train_tokenizer,
)
from skymemory.errors import InvalidInput  # noqa: E402

pytestmark = pytest.mark.engine


def test_the_same_seed_is_the_same_model() -> None:
    one, again, other = (build_small(seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_random_weights_have_the_spread_that_was_asked_for() -> None:
    model = build_llama({**SMALL_SHAPE, "hidden_size": 256}, weight_std=0.02)
    weight = model.model.embed_tokens.weight.detach()
    assert abs(float(weight.std()) - 0.02) < 2e-4 and abs(float(weight.mean())) < 1e-4
    first, second = (layer.mlp.up_proj.weight.detach() for layer in model.model.layers[:2])
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.05
    assert not model.training and model.dtype == torch.float32


def test_the_large_shape_is_tinyllamas() -> None:
    with torch.device("meta"):
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**TINYLLAMA_SHAPE))
    assert sum(p.numel() for p in model.parameters()) == 1_100_048_384


def test_a_model_saved_is_a_model_loaded(tmp_path: Path) -> None:
    model = build_small()
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype="float32")
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(InvalidInput, match=r"config\.json"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        load_model(tmp_path)
    with pytest.raises(InvalidInput, match="dtype"):
        build_small(dtype="int8")


def test_the_shipped_document_is_long_enough_for_the_demo(document: str) -> None:
    assert 25_000 < len(document) < 40_000
    ids = train_tokenizer(4096)(document)["input_ids"]
    assert len(ids) > 4096 + 128
    sentences = [sentence.strip() for sentence in document.replace("\n", " ").split(". ")]
    assert len(set(sentences)) > 0.98 * len(sentences)


def test_the_tokenizer_is_the_same_every_time_and_returns_every_text(tokenizer: Any, document: str) -> None:
    again = train_tokenizer(1024)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == 1024
    for text in (document, "naïve ☂ 漢字 \x01 </s>", "", "\n\n  two"):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id and max(ids) < 1024
        if "</s>" not in text:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    with pytest.raises(InvalidInput, match="at least 259"):
        train_tokenizer(100)


def test_a_tokenizer_saved_is_a_tokenizer_loaded(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("Hello, sky")["input_ids"] == tokenizer("Hello, sky")["input_ids"]
    with pytest.raises(InvalidInput, match="folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_document_that_is_not_text_is_refused(tmp_path: Path) -> None:
    good, latin, binary, empty = (tmp_path / name for name in ("good", "latin", "binary", "empty"))
    good.write_bytes(b"\xef\xbb\xbfWith a mark")
    latin.write_bytes("café".encode("latin-1"))
    binary.write_bytes(b"\x7fELF\0\0")
    empty.write_bytes(b" \n")
    assert read_document(good) == "With a mark"
    for path, reason in ((latin, "UTF-8"), (binary, "zero bytes"), (empty, "empty"), (tmp_path / "no", "no document")):
        with pytest.raises(InvalidInput, match=reason):
            read_document(path)
    assert shipped_document().startswith("THE LARKSPUR")
