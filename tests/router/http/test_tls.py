"""Servers asked over TLS, whose certificate an authority signed or not; servers that want a key of their own."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.router.mock_engine import MockEngine
from tests.router.running import Loop, Running, until

from skymemory.cli.main import main
from skymemory.errors import InvalidInput
from skymemory.router.settings import settings_from
from skymemory.router.tls import Authorities, self_signed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates that sign themselves, each its own authority, and a file that holds none."""
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "other"):
        made = self_signed()
        (folder / f"{name}.pem").write_bytes(made.chain)
        (folder / f"{name}.key").write_bytes(made.key)
    (folder / "none.pem").write_text("no certificate\n")
    return folder


@pytest.fixture
def engine(loop: Loop, folder: Path) -> Iterator[MockEngine]:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "ours.pem", folder / "ours.key")
    made = MockEngine("e", tls=serving)
    loop.run(made.start())
    yield made
    loop.run(made.die())


def table(engine: MockEngine, ca: Path | None) -> dict[str, object]:
    backend = {"url": engine.url, "name": "e"} | ({} if ca is None else {"ca": str(ca)})
    return {"backends": [backend], "health": {"every": 0.05, "failures": 1, "successes": 1, "metrics_every": 0.05}}


def test_requests_checks_models_and_metrics_go_over_tls(
    run: Callable[..., Running], engine: MockEngine, folder: Path
) -> None:
    engine.waiting = 7
    running = run(0, **table(engine, folder / "ours.pem"))
    for _ in range(2):
        assert running.complete().status == 200
    assert running.ask("GET", "/v1/models").json["data"][0]["id"] == "small"
    assert running.server is not None
    server = running.server.picker.fleet.servers["e"]
    until(lambda: server.reported is not None and server.reported.waiting == 7)
    assert server.healthy and engine.seen[0]["headers"]["host"] == f"127.0.0.1:{engine.port}"


@pytest.mark.parametrize("ca", ["other.pem", None])
def test_who_is_not_signed_by_the_authority_is_ejected_and_gets_no_request(
    run: Callable[..., Running], engine: MockEngine, folder: Path, ca: str | None
) -> None:
    running = run(0, **table(engine, None if ca is None else folder / ca))
    assert running.complete().status in (502, 503) and not engine.seen
    until(lambda: running.ask("GET", "/ready").status == 503)
    assert "certificate" in running.ask("GET", "/ready").json["reasons"][0]


def test_an_authority_is_taken_up_without_a_restart(
    run: Callable[..., Running], engine: MockEngine, folder: Path, loop: Loop, tmp_path: Path
) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes((folder / "other.pem").read_bytes())
    running = run(0, **table(engine, file))
    server = running.server
    assert server is not None
    until(lambda: running.ask("GET", "/ready").status == 503)

    async def reset(ca: Path) -> None:
        server.reset(settings_from(table(engine, ca)))

    with pytest.raises(InvalidInput, match="no certificate in PEM"):
        loop.run(reset(folder / "none.pem"))
    file.write_bytes((folder / "ours.pem").read_bytes() + b"\n")
    loop.run(reset(file))
    until(lambda: running.ask("GET", "/ready").status == 200)
    assert running.complete().status == 200
    watched = server._health._metrics.watched["e"]
    until(lambda: watched.last_s is not None)


def test_the_check_asks_over_tls_too(
    engine: MockEngine, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(ca: Path) -> tuple[int, str]:
        lines = ["[[backends]]", f"url = {json.dumps(engine.url)}", f"ca = {json.dumps(str(ca))}"]
        (tmp_path / "router.toml").write_text("\n".join(lines))
        return main(["route", "--check", "--settings", str(tmp_path / "router.toml")]), capsys.readouterr().out

    code, words = said(folder / "ours.pem")
    assert code == 0 and "models   small" in words and "metrics  vllm" in words
    code, words = said(folder / "other.pem")
    assert code == 1 and "certificate" in words
    code, words = said(folder / "nowhere.pem")
    assert code == 1 and "No such file" in words


def test_an_authority_for_a_server_without_tls_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ca.* is for https servers"):
        settings_from({"backends": [{"url": "http://127.0.0.1:1", "ca": "x.pem"}]})
    authorities = Authorities()
    one = authorities.context("https://a", folder / "ours.pem")
    assert one is authorities.context("https://b", folder / "ours.pem") is not None
    assert authorities.context("http://a", None) is None and authorities.context("https://a", None) is not one


@pytest.fixture
def guarded(loop: Loop) -> Iterator[MockEngine]:
    made = MockEngine("e", key="sk-engine", waiting=7)
    loop.run(made.start())
    yield made
    loop.run(made.die())


def keyed(engine: MockEngine, key_file: Path) -> dict[str, object]:
    made = table(engine, None)
    made["backends"] = [{"url": engine.url, "name": "e", "api_key_file": str(key_file)}]
    return made


def test_a_server_gets_its_own_key_with_requests_checks_models_and_metrics(
    run: Callable[..., Running], guarded: MockEngine, tmp_path: Path, loop: Loop
) -> None:
    """And no client's. Another key is taken up without a restart; a file without one is refused, and all stays."""
    file = tmp_path / "engine.key"
    file.write_text("sk-engine\n")
    running = run(0, **keyed(guarded, file))
    assert running.complete({"Authorization": "Bearer of-a-client"}).status == 200
    assert running.ask("GET", "/v1/models").json["data"][0]["id"] == "small"
    server = running.server
    assert server is not None
    until(lambda: server.picker.fleet.servers["e"].reported is not None)
    assert [one["headers"]["authorization"] for one in guarded.seen] == ["Bearer sk-engine"]

    async def reset() -> None:
        server.reset(settings_from(keyed(guarded, file)))

    file.write_text("two lines\nof something\n")
    with pytest.raises(InvalidInput, match=r"api_key_file .*on one line"):
        loop.run(reset())
    assert running.complete().status == 200
    guarded.key = "sk-another"
    file.write_text("sk-another\n")
    loop.run(reset())
    until(lambda: running.ask("GET", "/ready").status == 200)
    assert running.complete().status == 200


def test_the_check_shows_a_server_its_key(
    guarded: MockEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.key"

    def said() -> tuple[int, str]:
        lines = ["[[backends]]", f"url = {json.dumps(guarded.url)}", f"api_key_file = {json.dumps(str(file))}"]
        (tmp_path / "router.toml").write_text("\n".join(lines))
        return main(["route", "--check", "--settings", str(tmp_path / "router.toml")]), capsys.readouterr().out

    code, words = said()
    assert code == 1 and "No such file" in words
    file.write_text("sk-engine")
    code, words = said()
    assert code == 0 and "models   small" in words and "metrics  vllm" in words
    file.write_text("sk-wrong")
    code, words = said()
    assert code == 1 and "answered 401" in words
