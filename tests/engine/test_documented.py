"""What the disclosure and the README show, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.transformers.generation import generate  # noqa: E402

from skymemory import KVCManager, NamedValues, open_store  # noqa: E402

pytestmark = pytest.mark.engine

README = Path(__file__).parents[2] / "README.md"
GUIDE = Path(__file__).parents[2] / "docs/guide/transformers.md"
DISCLOSURE = """
kvc = KVCacheBlock()
inputs = tokenizer(prompt, return_tensors="pt")
out = model.generate(**inputs, past_key_values=kvc.get_cache(prompt))
kvc.add_blocks(prompt)
"""
"""Its "Example Use with Huggingface Transformers", to the letter; the model and tokenizer are a name's own there."""


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This user's constellation."""
    monkeypatch.setenv("SKYMEMORY_RUN_DIR", str(tmp_path / "run"))
    command = [sys.executable, "-m", "skymemory", "constellation"]
    up = [*command, "up", "--base-port", "auto", "--hosts", "1", "--delay", "off"]
    subprocess.run(up, check=True, capture_output=True, timeout=240)
    yield
    subprocess.run([*command, "down"], check=True, capture_output=True, timeout=240)


@pytest.fixture
def short(model: Any) -> Iterator[Any]:
    model.generation_config.max_new_tokens, before = 12, model.generation_config.max_new_tokens
    yield model
    model.generation_config.max_new_tokens = before


def test_the_example_of_the_disclosure_to_the_letter(short: Any, tokenizer: Any, document: str) -> None:
    names: dict[str, Any] = {"model": short, "tokenizer": tokenizer, "prompt": document[:2000]}
    names["KVCacheBlock"] = partial(KVCManager, short, tokenizer)
    exec(DISCLOSURE, names)
    assert names["out"][0].tolist() == generate(short, tokenizer, document[:2000])
    assert names["kvc"].get_cache(document[:2000]).result.cached_tokens > 500


@pytest.mark.brief("README")
@pytest.mark.usefixtures("sky")
@pytest.mark.parametrize("page", [README, GUIDE], ids=["README", "guide"])
def test_the_first_example_runs_as_it_is_written(page: Path, short: Any, tokenizer: Any, document: str) -> None:
    first = r"```python\n(from skymemory import KVCManager, open_store\n.*?)```"
    (example,) = re.findall(first, page.read_text(), re.S)
    prompt = document[:2000]
    for found in (0, 500):
        names: dict[str, Any] = {"model": short, "tokenizer": tokenizer, "prompt": prompt}
        exec(example, names)
        assert names["out"][0].tolist() == generate(short, tokenizer, prompt)
        assert names["kvc"].last.cached_tokens >= found
        names["kvc"].close()
        names["kvc"].store.close()


@pytest.mark.usefixtures("sky")
def test_the_other_examples_of_the_readme_run_as_they_are_written() -> None:
    examples = [one for one in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "KVCManager" not in one]
    for example in examples:
        exec(example, {"data": b"whatever" * 1000})
    with open_store("constellation") as store:
        assert examples and NamedValues(store).get("report.pdf") == b"whatever" * 1000
