"""Blocks of tokens: the tokenizer and the chat template of a model's folder, beside transformers as the judge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skymemory import native
from skymemory.conductor.request import seed
from skymemory.engine.inputs import small_model_folder
from skymemory.errors import InvalidInput
from skymemory.router.prompts.reader import CHAT_COMPLETIONS, COMPLETIONS, PromptReader
from skymemory.router.prompts.tokenizing import PromptTokenizer
from skymemory.router.settings import Prompts, Settings

SHIPPED = small_model_folder()
TEMPLATE = """{{ bos_token }}{%- if tools %}tools: {{ tools | tojson }}
{% endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}{{ raise_exception("who?") }}{% endif %}
<|{{ message.role }}|>
{% generation %}{{ message.content }}{% endgeneration %}

{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}"""
TURNS = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Where is the anchor? Ünder us."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model's tokenizer, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def read(reader: PromptReader, path: str, **body: object):  # type: ignore[no-untyped-def]
    return reader.read(path, {}, json.dumps(body).encode())


def reader_of(folder: Path, block_tokens: int) -> PromptReader:
    return PromptReader(Settings(prompts=Prompts(tokenizer=folder, block_tokens=block_tokens)))


def of_chat(tokenizer: PromptTokenizer, tools: list[Any] | None = None) -> list[int]:
    text = tokenizer.chat_text(TURNS, tools)
    assert text is not None
    return tokenizer.of_text(text, special=False)


@pytest.mark.engine
def test_tokens_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    judge = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ours = PromptTokenizer(folder)
    text = "The anchor moves; the box follows it. " * 5
    assert ours.of_text(text) == judge(text)["input_ids"]
    tools = [{"type": "function", "function": {"name": "look", "description": "ü"}}]
    for given in ({}, {"tools": tools}):
        theirs = judge.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=True, return_dict=True, **given)
        assert of_chat(ours, given.get("tools")) == list(theirs["input_ids"])


def test_blocks_are_of_tokens(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    reader = reader_of(folder, 8)
    text = "The anchor moves; the box follows it. " * 20
    ids = tokenizer.of_text(text)
    request = read(reader, COMPLETIONS, prompt=text)
    assert request.prompt.tokens == len(ids) and request.prompt.block_tokens == 8
    expected = native.chain_hashes(np.array(ids, dtype="<u4").tobytes(), 32, seed("", "", ""))
    assert np.array_equal(request.prompt.blocks, expected)
    assert np.array_equal(read(reader, COMPLETIONS, prompt=ids).prompt.blocks, expected)


def test_a_chat_goes_through_the_template(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    reader = reader_of(folder, 4)
    request = read(reader, CHAT_COMPLETIONS, messages=TURNS)
    assert request.prompt.tokens == len(of_chat(tokenizer))
    parts = [TURNS[0], {"role": "user", "content": [{"type": "text", "text": TURNS[1]["content"]}]}]
    assert np.array_equal(read(reader, CHAT_COMPLETIONS, messages=parts).prompt.blocks, request.prompt.blocks)


def test_what_the_template_refuses_is_still_read(folder: Path) -> None:
    reader = reader_of(folder, 4)
    odd = [{"role": "oracle", "content": "the anchor " * 20}]
    one, two = read(reader, CHAT_COMPLETIONS, messages=odd), read(reader, CHAT_COMPLETIONS, messages=odd)
    assert len(one.prompt.blocks) > 5 and np.array_equal(one.prompt.blocks, two.prompt.blocks)
    plain = PromptTokenizer(SHIPPED)
    assert plain.chat_text(TURNS) is None


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no tokenizer at"):
        PromptTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="cannot be read"):
        PromptTokenizer(tmp_path)
    shutil.copy(SHIPPED / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InvalidInput, match="template"):
        PromptTokenizer(tmp_path)
