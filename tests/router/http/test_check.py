"""``skymemory route --check``: each thing that can be wrong with a server, said in words and by the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.router import mock_engine
from tests.router.engines.test_events import BLOCK_TOKENS, a_publisher
from tests.router.running import Running

from skymemory.cli.main import main
from skymemory.engine.inputs import small_model_folder
from skymemory.router.http import check

TRAINED = small_model_folder()
CACHE = 'vllm:cache_config_info{{block_size="32",num_gpu_blocks="96"}} 1\n'


class Checked:
    """The command's exit code and what it said, over servers of a settings file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._file = folder / "router.toml"
        self._capsys = capsys

    def __call__(
        self, *backends: dict[str, str], precise: bool = False, words: tuple[str, ...] = ()
    ) -> tuple[int, str]:
        lines = ["[prompts]", f"block_tokens = {BLOCK_TOKENS}"]
        if precise:
            lines = ['strategy = "precise"', *lines, f"tokenizer = {json.dumps(str(TRAINED))}"]
        for each in backends:
            lines += ["[[backends]]", *(f"{key} = {json.dumps(value)}" for key, value in each.items())]
        self._file.write_text("\n".join(lines))
        code = main(["route", "--check", "--settings", str(self._file), *words])
        return code, self._capsys.readouterr().out


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Checked:
    monkeypatch.setattr(check, "EVENTS_S", 1.0)
    return Checked(tmp_path, capsys)


@pytest.fixture
def url(run: Callable[..., Running]) -> str:
    return run(1).engines[0].url


def test_servers_that_are_well_and_one_that_is_not_there(checked: Checked, url: str) -> None:
    code, said = checked({"url": url})
    assert code == 0 and "1 of 1 servers have no problem" in said
    assert "metrics  vllm\n" in said and "models   small" in said
    assert "note: metrics without vllm:cache_config_info" in said
    code, said = checked({"url": url}, {"url": "http://127.0.0.1:1"})
    assert code == 1 and "1 of 2 servers" in said and "problem: /health: connection refused" in said


def test_the_same_for_programs(checked: Checked, url: str) -> None:
    code, said = checked({"url": url, "name": "a"}, words=("--json",))
    printed: dict[str, Any] = json.loads(said)
    assert code == 0 and printed["with_problems"] == 0 and printed["servers"][0]["models"] == ["small"]


def test_blocks_of_another_size(checked: Checked, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock_engine, "METRICS", mock_engine.METRICS + CACHE)
    code, said = checked({"url": url})
    assert code == 0 and "vllm: 96 blocks of 32 tokens" in said and "prompts are cut" not in said
    with a_publisher() as publisher:
        code, said = checked({"url": url, "events": publisher.endpoint}, precise=True)
    assert code == 1 and "its blocks have 32 tokens, and `block_tokens` is 4" in said


@pytest.mark.slow
def test_events(checked: Checked, url: str) -> None:
    with a_publisher() as publisher:
        held = publisher.order(publish=20)
        code, said = checked(
            {"url": url, "events": publisher.endpoint, "replay": publisher.replay_endpoint}, precise=True
        )
        assert code == 0 and f"events   whole: {len(held)} blocks, 20 batches" in said
        code, said = checked({"url": url, "events": publisher.endpoint}, precise=True)
        assert code == 0 and "waiting: 0 blocks" in said and "without `replay`" in said
        code, said = checked({"url": url, "events": publisher.endpoint, "replay": "tcp://127.0.0.1:1"}, precise=True)
        assert code == 1 and "no replay: tcp://127.0.0.1:1 did not answer" in said


def test_events_that_are_not_published_or_not_announced(
    checked: Checked, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = checked({"url": url, "events": "tcp://127.0.0.1:1"}, precise=True)
    assert code == 1 and "no publisher at tcp://127.0.0.1:1" in said
    code, said = checked({"url": url}, precise=True)
    assert code == 1 and "`events`, their address, is missing" in said
    sources = [{"data_parallel_rank": 0, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": None, "topic": ""}]
    monkeypatch.setattr(mock_engine.MockEngine, "event_sources", sources)
    code, said = checked({"url": url}, precise=True)
    assert code == 1 and "it publishes at tcp://10.0.0.1:5557" in said
    code, said = checked({"url": url, "events": "tcp://127.0.0.1:1"})
    assert code == 0 and "the strategy does not use them" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-keys", "nowhere"], "cannot read nowhere: No such file or directory"),
        (["--tls-cert", "nowhere", "--tls-key", "nowhere"], "cannot read nowhere: No such file or directory"),
        (["--cost", "nowhere"], "cost model nowhere: No such file or directory"),
        (["--tokenizer", "nowhere"], "no tokenizer at nowhere"),
    ],
)
def test_a_check_refuses_files_that_a_start_would_refuse(
    words: list[str], said: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["route"], ["route", "--check"]):
        assert main([*verb, "--backend", url, *words]) == 2
        assert said in capsys.readouterr().err


def test_json_without_a_check_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--backend", url, "--json"]) != 0
    assert "--json needs --check" in capsys.readouterr().err
