"""The README's blocks, as typed: a constellation, its two Python blocks, an engine, a router and the values by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.docs.test_documentation import FENCE, ROOT

BLOCKS = [(language, body) for _, _, language, body in FENCE.findall((ROOT / "README.md").read_text("utf-8"))]
START_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600)]


def commands(first_word: str) -> list[str]:
    """The README's commands that begin so, without their comments, continued lines joined by the shell."""
    found = []
    for language, body in BLOCKS:
        if language == "bash":
            joined = body.replace("\\\n", "\0")
            # A quoted argument may go on in the next line.
            lines, held = [], ""
            for line in joined.splitlines():
                held = f"{held}\n{line}" if held else line
                if held.count("'") % 2 == 0:
                    lines.append(held.replace("\0", "\\\n"))
                    held = ""
            found += [line.partition("  #")[0].strip() for line in lines if line.startswith(first_word)]
    return found


def python_block(containing: str) -> str:
    (body,) = [body for language, body in BLOCKS if language == "python" and containing in body]
    return body


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the README in it, in which the installed command runs as a user's shell would run it."""
    monkeypatch.setenv("SKYMEMORY_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    return tmp_path


def shell(command: str, place: Path) -> str:
    ended = subprocess.run(
        ["bash", "-c", command], cwd=place, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@contextmanager
def served(command: str, place: Path, *ports: int) -> Iterator[None]:
    """The command in a terminal of its own, until its ports answer; ended by Ctrl-C's signal."""
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"port {port}, which the README names, is in use here")
    with (place / f"{ports[0]}.log").open("wb") as log:
        process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=place, stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + START_S
            for port in ports:
                while not _is_ready(port):
                    assert process.poll() is None, Path(log.name).read_text("utf-8")
                    assert time.monotonic() < deadline_s, Path(log.name).read_text("utf-8")
                    time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(30)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_constellation_transformers_and_values(place: Path) -> None:
    shell("skymemory constellation up --base-port auto", place)
    try:
        script = "\n".join(
            [
                "from skymemory.engine.transformers.models import ready_model",
                "from skymemory.engine.inputs import shipped_document",
                "ready = ready_model('small', dtype='float32')",
                "model, tokenizer, prompt = ready.model, ready.tokenizer, shipped_document()[:1500]",
                "for _ in range(2):",
                *(f"    {line}" for line in python_block("kvc.get_cache").splitlines()),
                "data = b'bytes of a report'",
                *python_block("NamedValues").splitlines(),
                "with open_store('constellation') as store:",
                "    assert NamedValues(store).get('report.pdf') == data",
            ]
        )
        (place / "first.py").write_text(script, "utf-8")
        first, second = [line for line in shell(f"{sys.executable} first.py", place).splitlines() if line.strip()][-2:]
        assert "none cached" in first
        assert " from constellation" in second
        (put,) = [command for command in INLINE if command.startswith("skymemory kv put")]
        (get,) = [command for command in INLINE if command.startswith("skymemory kv get")]
        shell(put, place)
        shell(get, place)
        assert (place / "copy.md").read_bytes() == (place / "README.md").read_bytes()
    finally:
        shell("skymemory constellation down", place)


INLINE = [part for part in (ROOT / "README.md").read_text("utf-8").replace("\n", " ").split("`") if "skymemory" in part]


def test_engine_and_router(place: Path) -> None:
    (serve,) = commands("skymemory serve")
    (route,) = commands("skymemory route")
    curls = commands("curl")
    to_engine, to_router = (next(each for each in curls if port in each) for port in (":8001", ":8080"))
    with served(serve, place, 8001, 8002), served(route, place, 8080):
        assert json.loads(shell(to_engine, place))["choices"][0]["text"].strip()
        shell(to_router, place)
        head, _, body = shell(to_router, place).partition("\n\n")
        head = head.replace("\r", "")
        assert "x-skymemory-decision" in head.lower()
        assert json.loads(body or head.split("\n\n")[-1])["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
