"""Every line of the guide on transformers runs as written, twice, and says what the model says without a cache."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.engine.transformers.generation import BLOCK, manager  # noqa: E402
from tests.engine.transformers.test_uses import ANNOUNCED, FIVE, TEMPLATE, seeing  # noqa: E402

from skymemory.engine.transformers.models import (  # noqa: E402
    build_small,
    train_tokenizer,
)

pytestmark = pytest.mark.engine

GUIDE = Path(__file__).parents[2] / "docs/guide/transformers.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)


def block(of: str) -> str:
    """The one block of the guide with these words."""
    (found,) = [one for one in BLOCKS if of in one]
    return found


def without_cache(code: str) -> str:
    """The same lines for one who has no cache."""
    lines = [line for line in code.splitlines() if not line.startswith("kvc.")]
    return re.sub(r", past_key_values=kvc\.get_cache\(\w+\)", "", "\n".join(lines))


@pytest.fixture
def model() -> Any:
    """One of its own: it is changed."""
    model = build_small(seed=7)
    model.generation_config.max_new_tokens = 10
    model.generation_config.pad_token_id = 0
    return model


def run_twice(code: str, names: dict[str, Any]) -> list[int]:
    """How many tokens came from the cache, before ``code`` was run once and after."""
    torch.manual_seed(2)
    plain = dict(names)
    exec(without_cache(code), plain)
    found = []
    for _ in range(2):
        mine = dict(names)
        torch.manual_seed(2)
        exec(code, mine)
        assert torch.equal(mine["out"], plain["out"])
        found.append(mine["kvc"].last.cached_tokens)
        mine["kvc"].add_blocks(mine["prompt"])
    return found


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("line", ["padding_side", "[prompt] * 4", "Where?", "num_beams", "prompt_lookup_num_tokens"])
def test_a_line_for_each_use(line: str, model: Any, tokenizer: Any, document: str, caplog: Any) -> None:
    if line in ("num_beams", "prompt_lookup_num_tokens") and not ANNOUNCED:  # lines of one example
        pytest.skip("prompt lookup of this transformers fails without an end token")
    caplog.set_level(logging.WARNING, "skymemory")
    with manager(model, tokenizer) as kvc:
        names = {"model": model, "tokenizer": tokenizer, "prompt": document[:1500], "kvc": kvc}
        names["assistant"] = build_small(seed=7)
        first, second = run_twice(block(line), names)
        assert first < 400 < second
        assert not [record for record in caplog.records if record.name.startswith("skymemory")]


def test_a_chat(model: Any, document: str) -> None:
    tokenizer = train_tokenizer(1024)
    tokenizer.chat_template = TEMPLATE
    code = block("apply_chat_template")
    with manager(model, tokenizer) as kvc:
        chats: list[list[dict[str, str]]] = [[{"role": "system", "content": document[:800]}] for _ in range(2)]
        for question in ("What is a desk?", "And what is behind it?"):
            for messages, lines in zip(chats, (without_cache(code), code), strict=True):
                names = {"model": model, "tokenizer": tokenizer, "question": question, "kvc": kvc, "messages": messages}
                exec(lines, names)
            assert chats[0] == chats[1]
        assert kvc.last.computed_tokens < 60 < kvc.last.cached_tokens


def test_a_loop(model: Any, tokenizer: Any, document: str) -> None:
    ids = torch.tensor([tokenizer(document[:1500])["input_ids"]])
    with manager(model, tokenizer) as kvc, torch.inference_mode():
        plain = model(ids).logits[0, -1]
        for computed in (ids.shape[1], (ids.shape[1] - 1) % BLOCK + 1):
            names = {"model": model, "ids": ids, "kvc": kvc}
            exec(block("cache.begin()"), names)
            assert names["out"].logits.shape[1] == computed
            assert torch.allclose(names["out"].logits[0, -1], plain, atol=1e-4)
            kvc.add_blocks(ids)


@pytest.mark.brief()
def test_an_adapter(model: Any, tokenizer: Any, document: str) -> None:
    pytest.importorskip("peft")
    prompt = document[:1500]
    inputs = tokenizer(prompt, return_tensors="pt")
    with manager(model, tokenizer) as kvc:
        names = {"model": model, "tokenizer": tokenizer, "prompt": prompt, "kvc": kvc}
        bare = model.generate(**inputs)
        kvc.add_blocks(bare)
        try:
            exec(block("LoraConfig"), names)
        except ValueError as error:
            if "version of PEFT" not in str(error):
                raise
            pytest.skip(f"transformers {transformers.__version__} takes no released peft: {error}")
        assert kvc.last.cached_tokens == 0, "nothing of the bare model"
        assert torch.equal(names["out"], model.generate(**inputs)) and not torch.equal(names["out"], bare)
        assert torch.equal(names["out"], model.generate(**inputs, past_key_values=kvc.get_cache(prompt)))
        assert kvc.last.cached_tokens > 400
        model.disable_adapters()
        assert torch.equal(bare, model.generate(**inputs, past_key_values=kvc.get_cache(prompt)))
        assert kvc.last.cached_tokens == 0


def test_an_image() -> None:
    model = seeing()
    model.generation_config.max_new_tokens = 6
    draw = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (1, 100), generator=draw)
    ids[0, 40:44] = 99

    def processor(images: Any, text: Any, return_tensors: str) -> dict[str, Any]:
        return {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": images}

    with manager(model, None) as kvc:
        names = {"model": model, "processor": processor, "kvc": kvc, "prompt": ids, "image": torch.randn(1, 3, 16, 16)}
        run_twice(block("processor("), names)
        assert kvc.last.cached_tokens == 32


def test_every_block_of_the_guide_is_run_here_or_with_the_documented_examples() -> None:
    run = (
        "padding_side",
        "* 4",
        "Where?",
        "num_beams",
        "prompt_lookup",
        "apply_chat",
        "begin()",
        "LoraConfig",
        "processor(",
        "open_store",
        "describe()",
        "ready_model",
    )
    assert not [one for one in BLOCKS if not any(words in one for words in run)]


def test_what_it_says(model: Any, tokenizer: Any, document: str, capsys: Any) -> None:
    with manager(model, tokenizer) as kvc:
        exec(block("cache.result.describe()"), {"kvc": kvc, "prompt": document[:500]})
    assert "to compute" in capsys.readouterr().out


@pytest.mark.skipif(not FIVE, reason="what transformers 5 has saved is not read by this one")
def test_the_model_at_hand() -> None:
    from skymemory import KVCManager

    names: dict[str, Any] = {"KVCManager": KVCManager}
    exec(block("ready_model"), names)
    names["kvc"].close()
