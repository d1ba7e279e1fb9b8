"""Tokens of a prompt by its pieces: those of the whole, whatever the text, and what is known is not tokenized again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.running import Running

from skymemory.engine.inputs import small_model_folder
from skymemory.router.prompts import tokenizing
from skymemory.router.prompts.reader import CHAT_COMPLETIONS, COMPLETIONS, PromptReader, token_bytes
from skymemory.router.prompts.tokenizing import KNOWN_PATTERNS, PieceCache, PromptTokenizer, TooMuchNewText, can_cut
from skymemory.router.settings import Prompts, Settings

SHIPPED = small_model_folder()
BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = [
    "the",
    "box",
    "it's",
    "I'LL",
    "East",
    "aB",
    "x",
    "ñandú",
    "你好",
    "12345",
    "7",
    "<s>",
    "</s>",
    "<tool>",
    "e\u0301",
]
GAPS = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "\r\n",
    "",
    ".",
    "?! ",
    " \u00a0",
    "'",
    "/",
    " a ",
    "\u0301",
    "\u3000",
]
texts = st.lists(st.sampled_from(WORDS + GAPS) | st.text(max_size=3), max_size=60).map("".join)


def a_split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def saved(folder: Path, **changes: Any) -> Path:
    """The shipped model's tokenizer, changed, with one more token that is found in texts."""
    read = json.loads((SHIPPED / "tokenizer.json").read_text("utf-8"))
    read["added_tokens"].append({**read["added_tokens"][0], "id": len(read["model"]["vocab"]), "content": "<tool>"})
    read.update(changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(read))
    return folder


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[PromptTokenizer]:
    """One of every kind that is cut, in very small pieces."""
    folder = tmp_path_factory.mktemp("kinds")
    steps = [[{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}]]
    steps += [[a_split(pattern), BYTES] for pattern in sorted(KNOWN_PATTERNS)]
    changes: list[dict[str, Any]] = [{"pre_tokenizer": {"type": "Sequence", "pretokenizers": each}} for each in steps]
    changes += [{}, {"normalizer": {"type": "NFC"}}, {"post_processor": None}]
    made = [PromptTokenizer(saved(folder / str(at), **each), 3) for at, each in enumerate(changes)]
    assert all(each._pieces.cuts for each in made)
    return made


@pytest.mark.brief()
@settings(max_examples=60, deadline=None)
@given(first=texts, rest=texts)
def test_tokens_are_those_of_the_whole(kinds: list[PromptTokenizer], first: str, rest: str) -> None:
    for tokenizer in kinds:
        for text in (first, first + rest, first):
            for special in (True, False):
                assert tokenizer.text_tokens(text, special) == token_bytes(tokenizer.of_text(text, special))


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {**BYTES, "use_regex": True, "add_prefix_space": True}},
        {"pre_tokenizer": {**BYTES, "use_regex": False}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [a_split(r"[a-z ]+|."), BYTES]}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a b"}, "content": "c"}},
        {"added_tokens": [{"id": 0, "content": "the box", "single_word": False, "lstrip": False, "rstrip": False}]},
        {"added_tokens": [{"id": 0, "content": "<t>", "single_word": False, "lstrip": True, "rstrip": False}]},
    ],
)
def test_other_tokenizers_are_not_cut(tmp_path: Path, changes: dict[str, Any]) -> None:
    for added in changes.get("added_tokens", ()):
        added |= {"normalized": False, "special": True}
    tokenizer = PromptTokenizer(saved(tmp_path, **changes), 3)
    assert not tokenizer._pieces.cuts
    for text in ("the box moves to the east and the box is there", " a  b ", ""):
        assert tokenizer.text_tokens(text) == token_bytes(tokenizer.of_text(text))


def test_what_a_file_promises_is_tried() -> None:
    assert can_cut((SHIPPED / "tokenizer.json").read_text("utf-8"))
    assert not PieceCache(lambda texts: [[len(text)] for text in texts], cuts=True).cuts


def counted(most_bytes: int = 1 << 20) -> tuple[PieceCache, list[str]]:
    """Letters as tokens, and every piece that was tokenized."""
    seen: list[str] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        seen.extend(texts)
        return [[ord(letter) for letter in text] for text in texts]

    pieces = PieceCache(encode, cuts=True, piece_letters=8, most_bytes=most_bytes)
    seen.clear()
    return pieces, seen


def test_only_what_is_new_is_tokenized_and_only_for_whom_it_is_new() -> None:
    pieces, seen = counted()
    text = "the first turn of it all is long enough for pieces"
    assert pieces.tokens(text) == token_bytes([ord(letter) for letter in text])
    assert len(seen) > 3 and "".join(seen) == text
    seen.clear()
    pieces.tokens(text + " and then a second turn")
    assert "".join(seen) == pieces.cut(text)[-1] + " and then a second turn"
    seen.clear()
    assert pieces.tokens(text) and not seen
    pieces.tokens(text, salt="another user")
    assert "".join(seen) == text
    with pytest.raises(TooMuchNewText):
        pieces.tokens(text + " and quite another end", most_new=10)
    assert pieces.tokens(text, most_new=0)


@pytest.mark.parametrize("cuts", [True, False], ids=["a place to cut", "none"])
def test_no_call_of_the_tokenizer_is_long(monkeypatch: pytest.MonkeyPatch, cuts: bool) -> None:
    monkeypatch.setattr(tokenizing, "BATCH_LETTERS", 64)
    monkeypatch.setattr(tokenizing, "SLICE_LETTERS", 100)
    sizes: list[int] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return [list(map(ord, text)) for text in texts]

    cache = PieceCache(encode, cuts, piece_letters=8)
    for text in ("word " * 100, "a" * 450 + " end", "好" * 305):
        sizes.clear()
        assert np.frombuffer(cache.tokens(text), "<u4").tolist() == list(map(ord, text))
        assert sum(sizes) == len(text) and max(sizes) <= 200, sizes


def test_what_is_kept_is_bounded_and_goes_by_use() -> None:
    pieces, seen = counted(most_bytes=20_000)
    often = "this one is asked for again and again"
    for number in range(300):
        pieces.tokens(f"{number} is a text that no client asks for twice, ever since number {number} came by")
        seen.clear()
        pieces.tokens(often)
        assert not seen or number == 0
        assert 0 < pieces.kept_bytes <= 20_000
    pieces.tokens("x" * 100_000)
    assert pieces.kept_bytes <= 20_000


def test_threads_share_it() -> None:
    pieces, _ = counted(most_bytes=3000)
    texts = [f"{number} here is a text of some length that is cut to pieces" for number in range(20)]
    wrong: list[str] = []

    def ask() -> None:
        for text in texts * 20:
            if pieces.tokens(text) != token_bytes([ord(letter) for letter in text]):
                wrong.append(text)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong and pieces.kept_bytes <= 3000


def test_a_reader_says_when_much_is_new(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    )
    reader = PromptReader(Settings(prompts=Prompts(tokenizer=folder)))
    text = "The box moves to the east and is there before you are. " * 40
    turns = [{"role": "user", "content": text}]
    for path, body in ((COMPLETIONS, {"prompt": text}), (CHAT_COMPLETIONS, {"messages": turns})):
        data = json.dumps(body).encode()
        with pytest.raises(TooMuchNewText):
            reader.read(path, {}, data, most_new=100)
        whole = reader.read(path, {}, data)
        known = reader.read(path, {}, data, most_new=0)
        assert known.prompt.blocks.tolist() == whole.prompt.blocks.tolist() and len(whole.prompt.blocks) > 10
    with pytest.raises(TooMuchNewText):
        reader.read(COMPLETIONS, {}, json.dumps({"prompt": text, "cache_salt": "other"}).encode(), most_new=100)


def test_the_proxy_reads_much_that_is_new_in_a_thread(run: Callable[..., Running]) -> None:
    running = run(1, prompts={"tokenizer": str(SHIPPED)})
    assert running.server is not None
    reader, in_thread = running.server.reader, list[bool]()
    read = reader.read

    def noted(*given: Any, **options: Any) -> Any:
        found = read(*given, **options)
        in_thread.append(threading.current_thread() is not running.loop.thread)
        return found

    reader.read = noted  # type: ignore[method-assign]
    text = "The box moves to the east and is there before you are. " * 60
    for prompt in (text, text + "And then?", "short", text + text.upper()):
        assert running.complete(prompt=prompt).status == 200
    assert in_thread == [True, False, False, True]
