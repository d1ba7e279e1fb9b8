"""What a router knows beyond its own requests: from its last life, and from other routers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.router.running import Loop, Running, until

from skymemory.conductor.fleet import Fleet
from skymemory.errors import InvalidInput
from skymemory.router.knowledge import Knowledge
from skymemory.router.settings_file import settings_from

Run = Callable[..., Running]


def decision_of(running: Running, **body: Any) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        running.complete({"x-skymemory-decision": "1"}, **body).headers["x-skymemory-decision"]
    )
    return told


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


def test_routers_tell_each_other_what_they_learnt(loop: Loop) -> None:
    first = Running(loop).start(2, strategy="approximate", replicas={"listen": "127.0.0.1:0"})
    second = Running(loop, engines=first.engines)
    try:
        assert first.server is not None
        gossip = first.server.knowledge._replicas
        second.restart(strategy="approximate", replicas={"peers": [f"127.0.0.1:{gossip.port}"]})  # type: ignore[union-attr]
        until(lambda: second.ask("GET", "/ready").json["reasons"] == [])
        first.complete(prompt="a" * 4096)
        until(lambda: decision_of(second, prompt="a" * 4096)["matched_tokens"] == 1024)
        loop.run(first.server.close())
        first.server = None
        until(lambda: "what other routers learn is not known" in str(second.ask("GET", "/ready").json["reasons"]))
        assert second.complete().status == 200
    finally:
        second.engines = []
        second.close()
        first.close()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"strategy": "least-load", "state": "x"}, "nothing that could be kept"),
        ({"strategy": "least-load", "replicas": {"redis": "redis://a"}}, "nothing to share"),
        ({"strategy": "aproximate"}, "did you mean 'approximate'"),
        ({"strategy": "precise", "replicas": {"redis": "redis://a"}}, "nothing to share"),
        ({"replicas": {"redis": "redis://a", "listen": "127.0.0.1:0"}}, "not both"),
    ],
)
def test_what_does_not_go_together_is_said(table: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says.replace("(", r"\(")):
        Knowledge(settings_from(table), Fleet())
