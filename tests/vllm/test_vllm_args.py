"""The command that `skymemory vllm-args` prints starts vLLM; a second start loads what the first has saved; the doctor
finds both well, and names what a third one's context differs in.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.store.redis_server.daemons import daemon
from tests.vllm.server import MODEL, PYTHON, ROOT, START_S, free_port

from skymemory.cli.main import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: make test-vllm does it"),
    pytest.mark.timeout(1200),
]
PROMPT = [7 + (3 * at) % 400 for at in range(520)]
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1"}
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "CUDA_VISIBLE_DEVICES": ""}


def printed(*words: str) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(list(words))
    return code, said.getvalue()


@contextmanager
def started(line: str, log: Path) -> Iterator[str]:
    """Its URL, once the shell's command serves. ``python`` is that of vLLM's environment."""
    port = free_port()
    options = "--dtype float32 --max-model-len 1024 --block-size 32 --enforce-eager"
    command = f"exec {line.strip()} --served-model-name small --host 127.0.0.1 --port {port} {options}"
    path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("wb") as file:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.keeper", "/bin/sh", "-c", command],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=file, stderr=file,
            env=os.environ | QUIET | CPU | {"PATH": path, "PYTHONPATH": f"{ROOT / 'src'}"},
        )  # fmt: skip
    try:
        url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                break
            if keeper.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"vLLM did not start:\n{log.read_text('utf-8', 'replace')[-4000:]}")
            time.sleep(0.25)
        yield url
    finally:
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait(30)


def complete(url: str, prompt: Sequence[int]) -> None:
    body = f'{{"model": "small", "prompt": {list(prompt)}, "max_tokens": 1, "temperature": 0}}'.encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=120).read()


def external_tokens(url: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=20).read().decode()
    return sum(float(one) for one in re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", text, re.M))


def test_two_starts_by_the_printed_command(tmp_path: Path) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with daemon("memory://256MiB") as path:
        options = ["--store", f"unix://{path}", "--module", "--drain", "10s", "--cake"]
        code, line = printed("vllm-args", str(MODEL), *options)
        assert code == 0
        external = []
        for log in logs:
            with started(line, log) as url:
                complete(url, PROMPT)
                external.append(external_tokens(url))
                time.sleep(3)  # what is being saved
        assert external == [0, 512]
        code, said = printed("doctor", "--vllm", str(logs[0]), "--vllm", str(logs[1]))
        assert code == 0, said
        assert "vLLM 0.32" in said and "blocks of 32 tokens, values of 128" in said and "over memory" in said
        assert "both are the same" in said
        other = tmp_path / "other.log"
        other.write_text(logs[1].read_text().replace(", tp 1", ", tp 2").replace('"digest": "', '"digest": "0'))
        code, said = printed("doctor", "--vllm", str(logs[0]), "--vllm", str(other))
        assert code == 1 and f"layout: tp 1 in {logs[0]}, tp 2 in {other}" in said
