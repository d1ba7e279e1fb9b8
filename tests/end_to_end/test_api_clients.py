"""Responses and Messages by their own clients, unchanged and through the whole door: at `skymemory serve`, at engines
that have these APIs, and at engines that speak chat completions only, where the router translates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("aiohttp", reason="the router needs skymemory[router]")
pytest.importorskip("cryptography", reason="certificates need skymemory[secure]")

from tests.end_to_end.client_scripts import assert_all_are_ok, became_in_javascript, became_in_python
from tests.end_to_end.real_door import Door, real_door, real_engines
from tests.router.processes import Process

from skymemory.router.apis.translation import API_PATHS

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.clients, pytest.mark.timeout(600)]
TENANTS = "[tenants.gold]\nweight = 2.0\n\n[tenants.small]\nrequests_per_minute = 20\n"
KINDS = ["serve", "passed", "translated"]


@contextmanager
def scripted_engines(number: int, *paths: str) -> Iterator[list[str]]:
    """Addresses of engines that have these paths beside chat completions."""
    with ExitStack() as stack:
        started = []
        for at in range(number):
            process = Process("-m", "tests.router.chat_engine", f"e{at}", *paths)
            stack.callback(process.close)
            started.append(process)
        yield [f"http://127.0.0.1:{process.says('^[0-9]+')[0]}" for process in started]


@pytest.fixture(scope="module", params=KINDS)
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    paths = sorted(API_PATHS) if request.param == "passed" else []
    engines = real_engines(2) if request.param == "serve" else scripted_engines(2, *paths)
    with engines as urls, real_door(folder, urls, TENANTS) as door:
        yield door


@pytest.fixture
def kind(door: Door, request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["door"])


def calls_tools(kind: str) -> dict[str, str]:
    """The engine of `skymemory serve` has a model that calls none."""
    return {"DOOR_CALLS_TOOLS": "0" if kind == "serve" else "1"}


@pytest.mark.parametrize(
    ("script", "checks"), [("responses_python.py", 6), ("anthropic_python.py", 9), ("apis_langchain_litellm.py", 6)]
)
def test_clients_in_python(door: Door, kind: str, script: str, checks: int) -> None:
    of_tools = 0 if kind == "serve" else 3
    assert_all_are_ok(became_in_python(door, script, **calls_tools(kind)), checks + of_tools)


def test_clients_in_javascript(door: Door, kind: str, tmp_path: Path) -> None:
    of_tools = 0 if kind == "serve" else 3
    assert_all_are_ok(became_in_javascript(door, "apis_client.mjs", tmp_path, **calls_tools(kind)), 5 + of_tools)
