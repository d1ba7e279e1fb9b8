"""`skymemory demo vllm`: two vLLM servers, one after the other, that share a constellation.

The first computes a document's KV and is stopped; the second loads it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
    store_daemon,
    vllm_server,
)
from skymemory_lab.demo.estimate import format_took, say_estimate
from skymemory_lab.demo.resources import contention, slowdown

_SAVED_S = 6.0  # wait before vLLM is stopped: values are stored after the answers
_DOCUMENT_CHARACTERS = 4000
# Seconds of model and constellation, of a server's start, and of its answers.
_AROUND_S, _START_S, _ASK_S = 11.0, 20.0, 8.0
_QUESTIONS = ("How is a satellite started?", "Who is informed of a fault?", "What is done once a year?")


def run_vllm(args: argparse.Namespace) -> int:
    """Return 1 if the second server loaded nothing or answered differently."""
    if args.model is None:
        check_engine_installed("small")
    else:
        check_model_folder(args.model)
    python = python_of_vllm(args.python)
    document = shipped_document()[:_DOCUMENT_CHARACTERS]
    answers = []
    progress = Progress(sys.stderr)
    slow = slowdown(time.thread_time) * contention(1.6)  # API server and engine take turns for a part of it
    estimate_s = _AROUND_S * slow + 2 * (_START_S * slow + _ASK_S * slow + _SAVED_S)
    say_estimate(progress, estimate_s)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-")))
        with progress.wait("making a model"):
            model = args.model or random_model(folder / "model", progress, windows=args.windows)
        with progress.wait("starting a constellation of 95 satellites and the store daemon in front of it"):
            stack.enter_context(constellation(folder))
            store = stack.enter_context(store_daemon(folder))
        for name in ("first", "second"):
            with vllm_server(python, model, folder, name, store) as server:
                with progress.wait(f"starting the {name} vLLM", _START_S * slow):
                    server.wait()
                with progress.wait(f"asking the {name} vLLM {len(_QUESTIONS)} questions", _ASK_S * slow):
                    answers.append(_ask(python, server.url, document))
                with progress.wait("storing what was computed", _SAVED_S):
                    time.sleep(_SAVED_S)
        with progress.wait("ending all processes"):
            stack.close()
    if args.json:
        print(json.dumps(dict(zip(("first", "second"), answers, strict=True))))
    else:
        _print(answers)
    write(format_took(progress.seconds, estimate_s), sys.stderr if args.json else sys.stdout)
    same = [answer["text"] for answer in answers[0]] == [answer["text"] for answer in answers[1]]
    return 0 if same and answers[1][0]["cached_tokens"] > 0 else 1


def _print(answers: list[list[dict[str, Any]]]) -> None:
    rows = [
        [
            name,
            question,
            *(str(row[kind]) for kind in ("prompt_tokens", "cached_tokens")),
            f"{row['ttft_s'] * 1e3:.0f} ms",
        ]
        for name, server_answers in zip(("first", "second"), answers, strict=True)
        for question, row in zip(_QUESTIONS, server_answers, strict=True)
    ]
    print()
    Table(("server", "question", "tokens", "from cache", "first token"), rows, left=(0, 1)).print()
    print()
    write("The second server's first answer begins with what the first one stored in the sky.")


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
                "ttft_s": first_s,
                "text": text,
            }
        )
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    client()
