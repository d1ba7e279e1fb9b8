"""Every `skymemory` command in a block of the pages runs as it is written, or a test that runs its verb is named here.

test_documentation parses the same commands; a command can parse and still fail.
"""

from __future__ import annotations

import io
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sgp4.exporter import export_tle
from tests.constellation.synthetic import shell
from tests.docs.test_documentation import FENCE, PAGES, ROOT, SHELL_LANGUAGES

ELSEWHERE = {
    "serve": "end_to_end/test_serve.py",
    "route": "router/http/test_command.py",
    "epp": "router/envoy/test_command.py",
    "replay": "lab/replay/test_command.py",
    "fit": "lab/test_fitting.py",
    "demo route": "end_to_end/test_demo_route.py",
    "demo conductor": "lab/demo/test_conductor.py",
    "reproduce mooncake": "lab/cli/test_reproduce.py",
    "satellite": "end_to_end/test_constellation_processes.py",
    "constellation attach": "end_to_end/test_constellation_processes.py",
}
"""Commands that serve until stopped, take minutes or need other hosts, by their first words, and what runs them."""
UP = "skymemory constellation up --base-port auto"


def documented(page: Path) -> list[str]:
    """The commands of a page's blocks, without their comments."""
    lines: list[str] = []
    for _, _, language, body in FENCE.findall(page.read_text("utf-8")):
        if language.lower() in SHELL_LANGUAGES:
            lines += [line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines()]
    return [line.partition(" #")[0].strip() for line in lines if line.startswith(("skymemory ", "redis-cli "))]


def runs_elsewhere(command: str) -> bool:
    words = shlex.split(command)[1:]
    if command.startswith("redis-cli "):
        return shutil.which("redis-cli") is None
    return words[0] in ELSEWHERE or " ".join(words[:2]) in ELSEWHERE


def runnable(page: Path) -> list[str]:
    return [command for command in documented(page) if not runs_elsewhere(command)]


def test_the_tests_named_here_exist() -> None:
    assert [name for name in ELSEWHERE.values() if not (ROOT / "tests" / name).is_file()] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_benchmark_starts() -> None:
    """Those that the pages name, and the others: an import that has moved would be noticed when it is run next."""

    def said(benchmark: Path) -> str:
        ended = subprocess.run([sys.executable, benchmark, "--help"], capture_output=True, text=True, check=False)
        return ended.stderr[-300:] if ended.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        benchmarks = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
        failed = {path.name: words for path, words in zip(benchmarks, pool.map(said, benchmarks), strict=True) if words}
    assert failed == {}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.stem)
def test_every_command_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    """In the page's order and in one folder; a constellation is up throughout, as the text assumes."""
    for name in ("report.pdf", "notes.txt"):
        (tmp_path / name).write_bytes(os.urandom(100_000))
    # Of now, as from a download.
    elements, _, _ = shell(random.Random(1), 6, 12, 2, gap_share=0.1, at_unix_s=time.time())
    lines = [line for one in elements for line in (one.name, *export_tle(one.satrec))]
    (tmp_path / "starlink.tle").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "SKYMEMORY_RUN_DIR": str(tmp_path / "run")}
    daemons: list[subprocess.Popen[bytes]] = []

    def run(command: str) -> None:
        words = shlex.split(command.replace("/tmp/sky.sock", str(tmp_path / "sky.sock")))
        words = words if words[0] == "redis-cli" else [sys.executable, "-m", *words]
        if command.startswith("skymemory store serve"):
            daemons.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE))
            assert b"is served at" in (daemons[-1].stdout or io.BytesIO()).readline()
            return
        ran = subprocess.run(
            words,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ran.returncode == 0, f"{command}: {ran.stdout}{ran.stderr}"

    commands = runnable(page)
    in_the_sky = any(command.startswith(("skymemory kv", "skymemory constellation")) for command in commands)
    try:
        if in_the_sky:
            run(UP)
        for command in commands:
            if command.startswith("skymemory constellation up"):
                run("skymemory constellation down")
                command = command.replace("constellation up", "constellation up --base-port auto")
            run(command)
            if command.startswith("skymemory constellation down"):
                run(UP)
    finally:
        for daemon in daemons:
            daemon.terminate()
            assert daemon.wait(20) == 0
        if in_the_sky:
            run("skymemory constellation down")
