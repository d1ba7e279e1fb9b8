"""``skymemory replay`` against a real engine, whose own counts must agree, and against servers that misbehave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lab.door import Door
from tests.lab.odd_server import odd_server
from tests.settings_file import settings_file

from skymemory.cli.main import main

PATIENCE_S = 30.0


def a_trace(folder: Path, requests: int = 4, apart_ms: int = 20) -> Path:
    """All begin with block 0; each second one repeats the one before, with a block more."""
    file = folder / "trace.jsonl"
    lines = []
    for number in range(requests):
        ids = [0, 1 + number // 2 * 10, *([2 + number // 2 * 10] if number % 2 else [])]
        tokens = 512 * len(ids)
        lines.append({"timestamp": number * apart_ms, "input_length": tokens, "output_length": 40, "hash_ids": ids})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def reported(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["replay", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.brief("ids")
@pytest.mark.parametrize("how", ["completions", "chat", "ids"])
def test_the_report_agrees_with_the_engines_own_counts(
    door: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    url, out = f"http://127.0.0.1:{door.port}/v1", tmp_path / "out.jsonl"
    words = (str(a_trace(tmp_path, 6)), "--url", url, "--metrics", f"http://127.0.0.1:{door.port}", "--out", str(out))
    words += ("--prompt-unit", "ids") if how == "ids" else ()
    with settings_file(f"concurrency = 1\napi = '{'completions' if how == 'ids' else how}'") as more:
        code, report = reported(capsys, *words, "--scale-lengths", "0.1", "--max-tokens", "3", *more)
    assert code == 0 and report["completed"] == report["asked"] == 6 and not report["faults"]
    counted = report["engines"]
    assert counted["requests"] == 6
    assert counted["prompt_tokens"] == report["prompt_tokens"]
    assert counted["cached_tokens"] == report["cached_tokens"]
    assert counted["output_tokens"] == report["output_tokens"] == 18
    # Every prompt but the first begins with one that was there before; blocks of 16 tokens cut a little off.
    assert report["reusable"] - 0.1 < report["hit_ratio"] <= report["reusable"] + 0.02
    assert abs(report["length_errors"]["mean"]) < (0.001 if how == "ids" else 0.08)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == list(range(6))
    assert sum(line["cached_tokens"] for line in lines) == report["cached_tokens"]


def test_the_generator_and_characters_and_a_table_for_people(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workload", "tenants", "--requests", "3", "--rate", "50", "--scale-lengths", "0.15", "--max-tokens", "2")
    url = ("--url", f"http://127.0.0.1:{door.port}", "--prompt-unit", "characters")
    with settings_file("ttft_slo = '20s'") as more:
        assert main(["replay", *words, *url, *more]) == 0
    said = capsys.readouterr().out
    assert "3 requests due within" in said and "answers of 2 tokens on average" in said
    assert "3 requests in" in said and "3 completed, 0 refused, 0 failed" in said
    assert "TTFT ≤ 20 s: 100.0%" in said and "prompt lengths" not in said


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("refuses", "refused 429: too much to do"),
        ("breaks", "status 500: <html>oh no</html>"),
        ("breaks-in-a-list", 'status 500: ["oh no"]'),
        ("hangs", "no token in time: within 0.4 s"),
        ("stalls", "no end of the answer in time: within 3 s"),
        ("cuts", "stream cut short: it ended without finish_reason or [DONE]"),
        ("drops", "connection broken: "),
        ("garbles", "not JSON: '{oh no'"),
        ("answers-whole", "not a stream: the answer is application/json"),
    ],
)
def test_each_fault_of_a_server_is_a_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, kind: str
) -> None:
    with odd_server(how) as server:
        words = ("--url", server.url, "--scale-lengths", "0.05", "--max-tokens", "2")
        # Long enough for the first token of an answer that stalls behind it, on a busy computer too.
        with settings_file(f"patience = '{ {'hangs': '0.4s', 'stalls': '3s'}.get(how, '60s') }'") as more:
            code, report = reported(capsys, str(a_trace(tmp_path, 2)), *words, *more)
    assert code == 1 and report["completed"] == 0
    assert report["refused" if how == "refuses" else "failed"] == 2
    (fault,) = report["faults"]
    assert fault["count"] == 2 and fault["first"].startswith(kind)
    assert report["retry_after"] == (2 if how == "refuses" else 0)


def test_a_server_without_usage_is_replayed_by_characters_and_its_hits_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with odd_server("no-usage") as server:
        words = ("replay", str(a_trace(tmp_path)), "--url", server.url, "--scale-lengths", "0.2")
        assert main([*words]) == 1
        assert "use --prompt-unit characters" in capsys.readouterr().err
        assert main([*words, "--prompt-unit", "characters"]) == 0
    said = capsys.readouterr().out
    assert "it reports no usage" in said and "hits            unknown" in said


def test_a_server_that_knows_only_openais_fields_is_asked_with_those(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with odd_server("plain-openai") as server:
        assert main(["replay", str(a_trace(tmp_path)), "--url", server.url, "--scale-lengths", "0.05"]) == 0
    said = capsys.readouterr().out
    assert "does not accept ignore_eos" in said and "4 completed" in said
    assert all("ignore_eos" not in body for body in server.bodies[1:])


def test_requests_are_sent_when_due_whatever_became_of_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four of them 100 ms apart at twice the rate, to a server that never answers: all are out before one ends."""
    with odd_server("hangs") as server:
        words = ("--url", server.url, "--scale-lengths", "0.05", "--rate", "2")
        with settings_file("patience = 5") as more:
            code, report = reported(capsys, str(a_trace(tmp_path, 4, 100)), *words, *more)
    assert code == 1 and report["failed"] == 4
    assert report["seconds"] < 2 * 5.0, "none waits for the end of another"


def test_no_more_are_under_way_than_allowed_and_those_held_up_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three at once, one allowed, each given up after 0.3 s: the last waits for two."""
    with odd_server("hangs") as server:
        words = ("--url", server.url, "--scale-lengths", "0.05")
        with settings_file("patience = 0.3\nconcurrency = 1") as more:
            _, report = reported(capsys, str(a_trace(tmp_path, 3, 1)), *words, *more)
    assert report["failed"] == 3 and report["held_up"] == 2
    assert 0.55 < report["held_up_s"] < report["seconds"]
    assert report["late_s"]["most"] < report["held_up_s"], "what the cap held up is not the client's own lateness"


def test_a_key_is_sent_and_never_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with odd_server("breaks") as server:
        words = ("replay", str(a_trace(tmp_path)), "--url", server.url, "--scale-lengths", "0.05")
        with settings_file("api_key_env = 'MY_KEY'") as more:
            assert main([*words, *more]) == 1
    said = capsys.readouterr()
    assert "sk-secret" not in said.out + said.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--url", "http://127.0.0.1:1"], "expected either a trace or --workload"),
        (["t.jsonl", "--url", "127.0.0.1:1"], "expected an address such as"),
        (["--workload", "tenants", "--url", "http://127.0.0.1:1"], "--seconds or --requests"),
        (["t.jsonl", "--url", "http://x", "--rate", "0"], "--rate 0"),
        (
            ["t.jsonl", "--url", "http://x", "--prompt-unit", "ids", "--settings", "api = 'chat'"],
            "accepts no token ids",
        ),
        (["t.jsonl", "--url", "http://x", "--settings", "ids = [7, 9]"], "ids: [7, 9]: expected a range of at least"),
        (["t.jsonl", "--url", "http://x", "--settings", "api = 'chats'"], "api: 'chats': did you mean 'chat'?"),
        (["t.jsonl", "--url", "http://x", "--settings", "patience = 0"], "patience: expected more than 0"),
        (["t.jsonl", "--url", "http://x", "--settings", "jiter = 3"], "unknown setting; did you mean 'jitter'?"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [str(a_trace(tmp_path)) if word == "t.jsonl" else word for word in words]
    if "--settings" in words:
        (tmp_path / "replay.toml").write_text(words[-1])
        words[-1] = str(tmp_path / "replay.toml")
    assert main(["replay", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_no_listener_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert main(["replay", str(a_trace(tmp_path)), "--url", url]) == 1
    said = capsys.readouterr().err
    assert "cannot be reached" in said and said.count("\n") == 1


@pytest.mark.brief()
def test_ctrl_c_reports_what_was_done_and_leaves_nothing_running(tmp_path: Path) -> None:
    with odd_server("hangs") as server:
        command = [sys.executable, "-m", "skymemory", "replay", str(a_trace(tmp_path, 4, 700)), "--url", server.url]
        process = subprocess.Popen(
            [*command, "--scale-lengths", "0.05", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            end_s = time.monotonic() + PATIENCE_S
            while len(server.bodies) < 4 and time.monotonic() < end_s:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()
    report = json.loads(out)
    assert process.returncode == 130 and report["ended_early"] is True
    # Two probes and two requests had come; those two were under way.
    assert (report["sent"], report["interrupted"], report["failed"], report["unsent"]) == (2, 2, 0, 2)
