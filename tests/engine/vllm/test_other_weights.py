"""Blocks that vLLM itself still has of other weights, films and sounds at one place, and what else a key must say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.engine.vllm.engine import BLOCK, SIZE, Engine, Request
from tests.engine.vllm.test_both_sides import prompt
from tests.engine.vllm.test_reset import on, saved

from skymemory.engine.vllm.identity import context_of, weights_digest
from skymemory.errors import InvalidInput
from skymemory.kv.block import OpaqueLayout
from skymemory.store.memory import MemoryStore

VALUE = BLOCK * SIZE
WORDS = prompt(4 * VALUE + 1)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(1 << 20) as store:
        yield store


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"one")
    return tmp_path / "adapter"


def lora(folder: Path, inplace: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=1, lora_name="sql", lora_path=str(folder), load_inplace=inplace)


def behind_a_local_hit(engine: Engine, request: Request, table: list[int]) -> None:
    """vLLM has found four values in its own cache; the rest is computed, and what is whole would be saved."""
    assert engine.matched(request, 4 * VALUE) == (0, False)
    engine.tables[request.request_id] = table[: 4 * SIZE] + [engine.free.pop(0) for _ in range(2)]
    engine.scheduler.allocated(request, 0)
    request.num_computed_tokens = 4 * VALUE
    engine.step((request, request.num_tokens - 4 * VALUE))
    saved(engine)


def is_sound_wherever_it_is_loaded(engine: Engine, request: Request) -> int:
    tokens, _ = engine.matched(request)
    engine.admit(request, tokens)
    if tokens:
        engine.until_loaded(request)
    assert engine.sound(request, tokens)
    return tokens


def test_what_vllm_kept_through_a_reset_is_not_saved_as_new(store: MemoryStore) -> None:
    """It keeps its cache where blocks are in use, and says False."""
    engine = on(store)
    first = Request("first", WORDS)
    engine.matched(first)
    engine.admit(first)
    engine.step((first, first.num_tokens))
    engine.scheduler.reset(is_empty=False)
    engine.weights = 7
    behind_a_local_hit(engine, Request("second", WORDS), engine.tables["first"])
    assert is_sound_wherever_it_is_loaded(engine, Request("third", WORDS)) == 0
    engine.scheduler.reset(is_empty=True)
    fourth = Request("fourth", prompt(4 * VALUE + 1, 4))
    engine.matched(fourth)
    engine.admit(fourth)
    engine.step((fourth, fourth.num_tokens))
    saved(engine)
    assert is_sound_wherever_it_is_loaded(engine, Request("fifth", fourth.all_token_ids)) == 4 * VALUE
    engine.close()


def test_blocks_of_an_adapter_of_before_are_not_saved_as_of_the_one_loaded_in_its_place(
    store: MemoryStore, adapter: Path
) -> None:
    engine = on(store)
    first = Request("first", WORDS, lora_request=lora(adapter))
    engine.matched(first)
    engine.admit(first)
    engine.step((first, first.num_tokens))
    saved(engine)
    table = engine.tables["first"]
    engine.scheduler.finished(first)
    (adapter / "adapter_model.safetensors").write_bytes(b"two!")
    behind_a_local_hit(engine, Request("second", WORDS, lora_request=lora(adapter, inplace=True)), table)
    other = on(store)
    other.weights = 9
    assert is_sound_wherever_it_is_loaded(other, Request("third", WORDS, lora_request=lora(adapter))) == 0
    for one in (engine, other):
        one.close()


def test_what_is_computed_after_an_adapter_was_loaded_in_place_is_not_saved_as_of_the_old_one(
    store: MemoryStore, adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "adapter_model.safetensors").write_bytes(b"one")
    engine = on(store)
    first = Request("first", WORDS, lora_request=lora(adapter))
    engine.matched(first)
    engine.admit(first)
    engine.step((first, 2 * VALUE))
    saved(engine)
    (adapter / "adapter_model.safetensors").write_bytes(b"two!")
    engine.scheduler.new(Request("other", WORDS, lora_request=lora(adapter, inplace=True)))
    engine.weights = 9
    engine.step((first, first.num_tokens - 2 * VALUE))
    saved(engine)
    other = on(store)
    request = Request("second", WORDS, lora_request=lora(tmp_path / "copy"))
    assert is_sound_wherever_it_is_loaded(other, request) == 2 * VALUE
    for one in (engine, other):
        one.close()


def media(*names: str) -> list[SimpleNamespace]:
    """All begin with the fifth token, as a film and its own sound do."""
    place = SimpleNamespace(offset=4, length=40)
    return [SimpleNamespace(identifier=name, mm_position=place) for name in names]


def test_a_film_and_its_sound_are_both_in_the_key(store: MemoryStore) -> None:
    engine = on(store)
    found = set()
    shown = [("film", "sound"), ("sound", "film"), ("film", "other"), ("other", "sound"), ("film",), ("sound",)]
    for number, names in enumerate(shown):
        request = Request(str(number), WORDS)
        request.mm_features = media(*names)
        known = engine.scheduler._of(request)
        assert known is not None
        found.add(tuple(known.keys))
    assert len(found) == len(shown)
    engine.close()


class Configuration(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def engine_of(rope: dict[str, Any], longest: int, prepared: object = None) -> SimpleNamespace:
    model = SimpleNamespace(
        hf_config=Configuration(model_type="phi3", text_config={"rope_parameters": rope}),
        quantization=None,
        dtype="torch.bfloat16",
        seed=0,
        max_model_len=longest,
        multimodal_config=SimpleNamespace(mm_processor_kwargs=prepared),
    )
    load, cache = SimpleNamespace(load_format="dummy"), SimpleNamespace(cache_dtype="auto")
    return SimpleNamespace(model_config=model, load_config=load, cache_config=cache)


def test_long_rope_differs_where_long_prompts_are_allowed() -> None:
    def digest(rope_type: str, longest: int) -> bytes:
        rope = {"rope_type": rope_type, "original_max_position_embeddings": 4096}
        return context_of(engine_of(rope, longest), [OpaqueLayout("packing", 128, 1024)]).digest()

    assert digest("longrope", 4096) == digest("longrope", 2048) != digest("longrope", 4097)
    assert digest("llama3", 4096) == digest("llama3", 131072)


def test_images_that_the_engine_prepares_otherwise_are_others() -> None:
    def digest(prepared: object) -> bytes:
        return context_of(engine_of({}, 4096, prepared), [OpaqueLayout("packing", 128, 1024)]).digest()

    assert digest(None) == digest({}) != digest({"do_normalize": False})


@pytest.mark.parametrize(
    ("file", "more", "said"),
    [
        (
            "model.safetensors",
            {"model_weights": "s3://bucket/model"},
            "s3://bucket/model, where their contents are not",
        ),
        ("model.safetensors.index.json", {}, "has no file of weights"),
        ("model.tensors", {}, "has no file of weights"),
    ],
)
def test_weights_whose_contents_are_not_known_are_refused(
    tmp_path: Path, file: str, more: dict[str, str], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text("weights")
    model = SimpleNamespace(**{"model": str(tmp_path), "revision": None, "trust_remote_code": False, **more})
    with pytest.raises(InvalidInput, match=f"{said}.*give the model as a folder"):
        weights_digest(model, "auto")


@pytest.mark.parametrize("name", ["s3://bucket/model", "/nowhere/model.gguf", "some/model"])
def test_a_model_that_is_no_folder_says_what_to_do(name: str) -> None:
    model = SimpleNamespace(model=name, revision=None, trust_remote_code=False, model_weights="")
    with pytest.raises(InvalidInput, match="give the model as a folder"):
        weights_digest(model, "auto")
