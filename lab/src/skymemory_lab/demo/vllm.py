"""`skymemory demo vllm`: two vLLM servers that share memory, beside a plain one.

The first computes a document's KV, and the second loads it from the memory of a process that owns it for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from skymemory.engine.inputs import check_engine_installed, check_model_folder, shipped_document
from skymemory.errors import SkyMemoryError
from skymemory.progress import Progress
from skymemory.text import Table, write
from skymemory_lab.demo.engines import (
    constellation,
    our_package,
    python_of_vllm,
    random_model,
    shared_memory,
    store_daemon,
    vllm_server,
)
from skymemory_lab.demo.estimate import format_took, say_estimate
from skymemory_lab.demo.resources import contention, slowdown

_SAVED_S = 6.0  # wait before the second server is asked: values are stored after the answers
_DOCUMENT_CHARACTERS = 4000
# Seconds of the model and the store, of the constellation, of the first server's start and of two more, of answers.
_AROUND_S, _SKY_S, _START_S, _STARTS_S, _ASK_S = 8.0, 8.0, 20.0, 32.0, 8.0
_QUESTIONS = ("How is a satellite started?", "Who is informed of a fault?", "What is done once a year?")
_SERVERS = ("plain", "first", "second")
_USED = "vllm:skymemory_used_tokens_total"


def run_vllm(args: argparse.Namespace) -> int:
    """Return 1 if the second server loaded nothing or a server answered differently."""
    if args.model is None:
        check_engine_installed("small")
    else:
        check_model_folder(args.model)
    python = python_of_vllm(args.python)
    document = shipped_document()[:_DOCUMENT_CHARACTERS]
    answers = []
    progress = Progress(sys.stderr)
    slow = slowdown(time.thread_time) * contention(1.6)  # API server and engine take turns for a part of it
    in_sky = args.store == "constellation"
    estimate_s = (_AROUND_S + in_sky * _SKY_S + _START_S + _STARTS_S + 3 * _ASK_S) * slow + _SAVED_S
    say_estimate(progress, estimate_s)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-")))
        served = "" if in_sky else args.store or stack.enter_context(shared_memory())
        with progress.wait("making a model"):
            model = args.model or random_model(folder / "model", progress, windows=args.windows)

        def ask(name: str, url: str) -> None:
            with progress.wait(f"asking the {name} vLLM {len(_QUESTIONS)} questions", _ASK_S * slow):
                answers.append(_ask(python, url, document))

        with vllm_server(python, model, folder, "plain", "") as server:
            with progress.wait("starting plain vLLM", _START_S * slow):
                server.wait()
            ask("plain", server.url)
        if in_sky:
            with progress.wait("starting a constellation of 95 satellites"):
                stack.enter_context(constellation(folder))
        with progress.wait("starting the store daemon"):
            store = stack.enter_context(store_daemon(folder, served))
        progress.say(f"the store {served or 'constellation'} is served, and engines use it by {store}")
        with progress.wait("starting two vLLM with the connector", _STARTS_S * slow):
            servers = [stack.enter_context(vllm_server(python, model, folder, name, store)) for name in _SERVERS[1:]]
            for server in servers:
                server.wait()
        ask("first", servers[0].url)
        with progress.wait("storing what was computed", _SAVED_S):
            time.sleep(_SAVED_S)
        ask("second", servers[1].url)
        with progress.wait("ending all processes"):
            stack.close()
    if args.json:
        print(json.dumps(dict(zip(_SERVERS, answers, strict=True))))
    else:
        _print(answers, store)
    write(format_took(progress.seconds, estimate_s), sys.stderr if args.json else sys.stdout)
    texts = [[answer["text"] for answer in server_answers] for server_answers in answers]
    return 0 if all(text == texts[0] for text in texts) and answers[2][0]["store_tokens"] > 0 else 1


def _print(answers: list[list[dict[str, Any]]], store: str) -> None:
    rows = [
        [
            name,
            question,
            *(f"{row[kind]:,}" for kind in ("prompt_tokens", "store_tokens")),
            f"{max(0, row['cached_tokens'] - row['store_tokens']):,}",
            f"{row['ttft_s'] * 1e3:.0f} ms",
        ]
        for name, server_answers in zip(_SERVERS, answers, strict=True)
        for question, row in zip(_QUESTIONS, server_answers, strict=True)
    ]
    print()
    head = ("server", "question", "tokens", "from store", "own cache", "first token")
    Table(head, rows, left=(0, 1)).print()
    print()
    plain, second = answers[0][0], answers[2][0]
    where = "shared memory" if store.startswith("host:") else store
    write(
        f"The second server took {second['store_tokens']:,} of {second['prompt_tokens']:,} tokens from {where}, where "
        f"the first had stored them: {second['ttft_s'] * 1e3:.0f} ms to the first token. Plain vLLM computed all in "
        f"{plain['ttft_s'] * 1e3:.0f} ms."
    )


_ANSWERS_S = 600.0


def _ask(python: Path, url: str, document: str) -> list[dict[str, Any]]:
    prompts = json.dumps([f"{document}\n\nQuestion: {question}\nAnswer:" for question in _QUESTIONS])
    done = subprocess.run(
        [str(python), "-m", "skymemory_lab.demo.vllm", url],
        input=prompts,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": our_package()},
        start_new_session=True,
        timeout=_ANSWERS_S,
    )
    if done.returncode:
        raise SkyMemoryError(f"the openai client: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def client() -> None:
    """Answer prompts in vLLM's environment: JSON on standard input, answers on standard output."""
    from openai import OpenAI

    api = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    api.completions.create(model="sky", prompt="The first request takes longer. " * 60, max_tokens=8)
    usage_too = {"include_usage": True}
    answers = []
    for prompt in json.load(sys.stdin):
        used_tokens = _used_tokens(sys.argv[1])
        started_s, first_s, text, usage = time.monotonic(), 0.0, "", None
        for piece in api.completions.create(
            model="sky",
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options=usage_too,
        ):
            if piece.choices and not first_s:
                first_s = time.monotonic() - started_s
            text += "".join(choice.text for choice in piece.choices)
            usage = piece.usage or usage
        details = usage.prompt_tokens_details if usage else None
        answers.append(
            {
                "prompt_tokens": usage.prompt_tokens if usage else 0,
                "cached_tokens": (details.cached_tokens or 0) if details else 0,
                "store_tokens": _used_tokens(sys.argv[1]) - used_tokens,
                "ttft_s": first_s,
                "text": text,
            }
        )
    json.dump(answers, sys.stdout)


def _used_tokens(url: str) -> int:
    """Return the tokens that a server has taken from its store instead of computing them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(_USED))


if __name__ == "__main__":
    client()
