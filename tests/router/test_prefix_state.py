"""What a router knows beyond its own requests: from its last life, and from other routers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.router.running import Loop, Running, until
from tests.store.real_redis import RedisServer

from skymemory.conductor.picker import Fleet
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.engine.inputs import small_model_folder
from skymemory.errors import InvalidInput
from skymemory.router import prefix_state
from skymemory.router.prefix_state import PrefixState, kind_of_blocks
from skymemory.router.settings import settings_from

Run = Callable[..., Running]


def decision_of(running: Running, **body: Any) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(
        running.complete({"x-skymemory-decision": "1"}, **body).headers["x-skymemory-decision"]
    )
    return printed


def test_a_router_that_starts_again_knows_what_it_knew(loop: Loop, tmp_path: Path) -> None:
    running = Running(loop).start(2, strategy="approximate", state=str(tmp_path / "index"))
    try:
        for talk in "abcd":
            running.complete(prompt=talk * 4096)
        served = {talk: decision_of(running, prompt=talk * 4096) for talk in "abcd"}
        assert running.server is not None
        loop.run(running.server.close())
        running.engines.reverse()  # servers have other slots then, and are found by their names
        running.restart(strategy="approximate", state=str(tmp_path / "index"))
        for talk, before in served.items():
            after = decision_of(running, prompt=talk * 4096)
            assert after["matched_tokens"] == 1024 and after["server"] == before["server"]
        loop.run(running.server.close())
        (tmp_path / "index").write_bytes(b"spoilt")
        running.restart(strategy="approximate", state=str(tmp_path / "index"))
        assert decision_of(running, prompt="a" * 4096)["matched_tokens"] == 0
    finally:
        running.close()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp())  # a socket's path must be short
    server = RedisServer(directory)
    yield server
    server.stop()
    shutil.rmtree(directory)


def degraded(running: Running) -> float:
    found = re.search(rb'replicas_degraded\{kind="redis"\} (.+)', running.ask("GET", "/metrics").body)
    return -1.0 if found is None else float(found[1])


def test_routers_agree_through_redis_and_go_on_without_it(loop: Loop, redis: RedisServer) -> None:
    shared: dict[str, Any] = {"strategy": "approximate", "replicas": {"redis": redis.url}}
    first = Running(loop).start(2, **shared)
    second = Running(loop, engines=first.engines)
    try:
        second.restart(**shared)
        first.complete(prompt="a" * 4096)
        until(lambda: decision_of(second, prompt="a" * 4096)["matched_tokens"] == 1024)
        until(lambda: degraded(first) == 0.0)
        redis.stop()
        until(lambda: "Redis does not answer" in str(first.ask("GET", "/ready").json["reasons"]))
        assert first.ask("GET", "/ready").status == 200, "requests are served all the same"
        until(lambda: degraded(first) == 1.0)
        first.complete(prompt="b" * 4096)
        until(lambda: decision_of(first, prompt="b" * 4096)["matched_tokens"] == 1024)
        redis.socket.unlink(missing_ok=True)
        redis.start()
        until(lambda: decision_of(second, prompt="b" * 4096)["matched_tokens"] == 1024)
        until(lambda: second.ask("GET", "/ready").json["reasons"] == [])
        assert b'skymemory_router_replica_deltas_total{outcome="received"}' in second.ask("GET", "/metrics").body
    finally:
        second.engines = []
        second.close()
        first.close()


def test_what_is_known_is_written_while_it_runs(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_state, "SAVE_S", 0.05)
    state = tmp_path / "index"
    running = Running(loop).start(1, strategy="approximate", state=str(state))
    try:
        until(state.exists)
        empty = state.stat().st_size
        running.complete(prompt="a" * 4096)
        until(lambda: state.stat().st_size > empty)
        state.unlink()
        state.mkdir()
        until(lambda: "cannot be saved" in str(running.ask("GET", "/ready").json["reasons"]))
        assert running.ask("GET", "/ready").status == 200
        state.rmdir()
        until(lambda: running.ask("GET", "/ready").json["reasons"] == [])
    finally:
        running.close()


@pytest.mark.parametrize("strategy", ["least-ttft", "approximate", "radix"])
def test_places_of_blocks_are_another_routers_secret(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets: list[int] = []

    class Index(prefix_state.ApproximatePrefixIndex):  # type: ignore[name-defined,misc]
        def __init__(self, blocks: int, most: int | None, secret: int) -> None:
            secrets.append(secret)
            super().__init__(blocks, most, secret)

    monkeypatch.setattr(prefix_state, "ApproximatePrefixIndex", Index)
    for _ in range(2):
        made = PrefixState(settings_from({"strategy": strategy, "options": {"blocks_per_server": 77}}), Fleet())
        assert isinstance(made._index, Index) and made._index.capacity_of(0) == 77
        assert made._index.max_match is None
    assert len(set(secrets)) == 2 and all(secret & 1 for secret in secrets)


@pytest.mark.parametrize(
    ("options", "most"), [({}, 2_048), ({"max_match_blocks": 9}, 9), ({"max_match_blocks": 0}, None)]
)
def test_without_a_limit_of_tokens_the_index_limits_blocks(options: dict[str, int], most: int | None) -> None:
    settings = settings_from({"strategy": "approximate", "options": {"max_match_tokens": 0} | options})
    index = PrefixState(settings, Fleet())._index
    assert isinstance(index, ApproximatePrefixIndex) and index.max_match == most


@pytest.mark.parametrize(("strategy", "options"), [("precise", {}), ("least-ttft", {"events": True})])
def test_so_are_those_of_blocks_that_engines_report(strategy: str, options: dict[str, Any]) -> None:
    tokenizer = small_model_folder()
    settings = settings_from({"strategy": strategy, "options": options, "prompts": {"tokenizer": str(tokenizer)}})
    indices = [PrefixState(settings, Fleet(), None).scorer.index for _ in range(2)]  # type: ignore[attr-defined]
    assert all(isinstance(index, PreciseIndex) and index.block_tokens == 16 for index in indices)
    assert indices[0].secret != indices[1].secret and all(index.secret & 1 for index in indices)


def test_blocks_of_another_kind_are_another_kind(tmp_path: Path) -> None:
    def kind(**prompts: Any) -> str:
        return kind_of_blocks(settings_from({"prompts": prompts}))

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(f'"{name}"')
    a, b = str(tmp_path / "a"), str(tmp_path / "b" / "tokenizer.json")
    kinds = [kind(), kind(block_bytes=32), kind(tokenizer=a), kind(tokenizer=b), kind(tokenizer=a, block_tokens=32)]
    assert len(set(kinds)) == 5 and kind(tokenizer=a) == kind(tokenizer=str(tmp_path / "a" / "tokenizer.json"))
    with pytest.raises(InvalidInput, match="no tokenizer at"):
        kind(tokenizer=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"strategy": "least-load", "state": "x"}, "no index that can be kept"),
        ({"strategy": "aproximate"}, "did you mean 'approximate'"),
        ({"replicas": {"redis": "http://a"}}, "expected redis://HOST"),
        ({"replicas": {"peers": ["router-1"]}}, "is not an address"),
        ({"replicas": {"peers": ["router-1:0"]}}, "expected the port of another router"),
        ({"replicas": {"every": "2s"}}, "5 ms to 1 s"),
        ({"replicas": {"silent": "1s"}}, "2 s or more"),
    ],
)
def test_what_does_not_go_together_is_said(table: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says.replace("(", r"\(")):
        PrefixState(settings_from(table), Fleet())


def test_a_file_that_a_later_release_wrote_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"SKYPREFX\2\0\0\0" + b"whatever a later release makes of it")
    before = path.read_bytes()

    async def live() -> list[str]:
        known = PrefixState(settings_from({"strategy": "approximate", "state": str(path)}), Fleet())
        await known.start()
        await known._save()
        troubles = known.troubles()
        await known.close()
        return troubles

    (trouble,) = asyncio.run(live())
    assert "version 2" in trouble and "is not overwritten" in trouble
    assert path.read_bytes() == before
