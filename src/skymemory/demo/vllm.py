"""`skymemory demo vllm`: two vLLM servers, one after the other, that share a constellation through the store daemon.

A constellation of 95 satellites with the delays of its geometry; `skymemory store serve` in front of it; vLLM with the
connector. The first server computes a document's keys and values and is stopped; the second has never seen it and loads
them. Requests are made by the openai client, in vLLM's environment (`client`, below), which is not the demo's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from skymemory.engine.inputs import check_engine_installed, check_model_folder, shipped_document
from skymemory.engine.vllm.settings import transfer_config
from skymemory.errors import InvalidInput, SkyMemoryError

START_S = 420.0
"""It takes half a minute on two cores that do nothing else."""
_GRACE_S = 15.0
_SAVED_S = 6.0
"""What was computed is on its way to the satellites behind the answers; vLLM kills its workers when it is stopped."""
_QUESTIONS = ("How is a satellite started?", "Who is informed of a fault?", "What is done once a year?")


def run_vllm(args: argparse.Namespace) -> int:
    """Prints tokens and times of each request; 1 if the second server loaded nothing, or answered otherwise."""

    python = args.python.absolute()
    if not python.is_file():
        raise InvalidInput(f"--python {args.python}: no such file; `make demo-vllm` makes an environment with vLLM")
    if args.model is None:
        check_engine_installed()
    else:
        check_model_folder(args.model)
    document = shipped_document()[: args.characters]
    answers = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-")))
        model = args.model or _random_model(folder / "model")
        _say("a constellation of 95 satellites, and the store daemon in front of it")
        stack.enter_context(_constellation(folder))
        stack.enter_context(_daemon(folder))
        for name in ("first", "second"):
            _say(f"the {name} vLLM starts: about half a minute")
            with _vllm(python, model, folder, name) as url:
                answers.append(_ask(python, url, document))
                time.sleep(_SAVED_S)
    if args.json:
        print(json.dumps(dict(zip(("first", "second"), answers, strict=True))))
    else:
        _print(answers)
    same = [one["text"] for one in answers[0]] == [one["text"] for one in answers[1]]
    return 0 if same and answers[1][0]["cached_tokens"] > 0 else 1


def _random_model(folder: Path) -> Path:
    """Of 280 million parameters: two cores compute the prompt in seconds, so that loading it pays."""
    from transformers.utils import logging as transformers_logging

    from skymemory.engine.models import TINYLLAMA_SHAPE, build_llama, train_tokenizer

    _say("a model of TinyLlama's shape, 6 of its 22 layers, with random weights")
    transformers_logging.disable_progress_bar()
    tokenizer = train_tokenizer()
    shape = {**TINYLLAMA_SHAPE, "num_hidden_layers": 6, "vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    build_llama(shape, dtype="bfloat16").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _print(answers: list[list[dict[str, Any]]]) -> None:
    print(f"\n{'server':8}{'question':32}{'prompt tokens':>14}{'from the cache':>16}{'first token':>14}")
    for name, rows in zip(("first", "second"), answers, strict=True):
        for question, row in zip(_QUESTIONS, rows, strict=True):
            print(
                f"{name:8}{question:32}{row['prompt_tokens']:14}{row['cached_tokens']:16}{row['ttft_s'] * 1e3:11.0f} ms"
            )
    print("\nThe second server's first answer begins with what the first one stored in the sky.")


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


@contextmanager
def _constellation(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "skymemory", "constellation"]
    where = ["--run-dir", str(folder / "run")]
    _run([*command, "up", "--base-port", "auto", "--delay", "real", *where], "the constellation")
    try:
        yield
    finally:
        _run([*command, "down", *where], "the constellation")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise SkyMemoryError(f"{what}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")


@contextmanager
def _process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """In a group of its own: ended by SIGTERM, after a while by force, with all that it started."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until(ready: Any, process: subprocess.Popen[bytes], what: str, log: Path, seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > ends_s:
            last = log.read_text("utf-8", "replace").strip().splitlines()
            raise SkyMemoryError(f"{what} did not start: {last[-1] if last else 'no output'}")
        time.sleep(0.2)


@contextmanager
def _daemon(folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "skymemory", "store", "serve", f"constellation://{folder / 'run'}"]
    log, path = folder / "daemon.log", folder / "sky.sock"
    with _process([*command, "--listen", f"unix://{path}"], log) as process:
        _until(path.is_socket, process, "the store daemon", log, 60)
        yield


@contextmanager
def _vllm(python: Path, model: Path, folder: Path, name: str) -> Iterator[str]:
    """Its URL, once it serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = transfer_config({"store": f"unix://{folder / 'sky.sock'}"})
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "sky"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"),
        *("--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log, url = folder / f"{name}.log", f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return True
        except OSError:
            return False

    with _process(command, log, PYTHONPATH=_our_package(), **quiet, **cpu) as process:
        _until(healthy, process, "vLLM", log, START_S)
        yield url


def _our_package() -> str:
    """For vLLM's environment, which need not have this package installed."""
    return str(Path(__file__).parents[2])


def _ask(python: Path, url: str, document: str) -> list[dict[str, Any]]:
    """One answer after the other, by the openai client."""
    asked = json.dumps([f"{document}\n\nQuestion: {question}\nAnswer:" for question in _QUESTIONS])
    done = subprocess.run(
        [str(python), "-m", "skymemory.demo.vllm", url],
        input=asked,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": _our_package()},
        start_new_session=True,
    )
    if done.returncode:
        raise SkyMemoryError(f"the openai client: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def client() -> None:
    """In vLLM's environment: prompts as JSON on standard input, answers on standard output."""
    from openai import OpenAI

    api = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    api.completions.create(model="sky", prompt="The first request takes longer. " * 60, max_tokens=8)
    usage_too = {"include_usage": True}
    answers = []
    for prompt in json.load(sys.stdin):
        began_s, first_s, text, usage = time.monotonic(), 0.0, "", None
        for piece in api.completions.create(
            model="sky",
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options=usage_too,
        ):
            if piece.choices and not first_s:
                first_s = time.monotonic() - began_s
            text += "".join(choice.text for choice in piece.choices)
            usage = piece.usage or usage
        details = usage.prompt_tokens_details if usage else None
        answers.append(
            {
                "prompt_tokens": usage.prompt_tokens if usage else 0,
                "cached_tokens": (details.cached_tokens or 0) if details else 0,
                "ttft_s": first_s,
                "text": text,
            }
        )
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    client()
