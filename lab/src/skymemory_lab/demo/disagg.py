"""`skymemory demo disagg`: prefill and decode on separate engines, with KV transfer through satellites.

A burst shows that requests refused early cost no prefill.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from skymemory.engine.inputs import check_model_folder, shipped_document
from skymemory.errors import SkyMemoryError
from skymemory.progress import Progress
from skymemory.text import Table, width_of, write
from skymemory_lab.demo.engines import (
    constellation,
    own_engine,
    python_of_vllm,
    random_model,
    router,
    store_daemon,
    vllm_server,
)
from skymemory_lab.demo.estimate import format_took, say_estimate
from skymemory_lab.demo.resources import contention, slowdown

_NEW_TOKENS = 16
_WAITS_S = 15.0  # seconds that no processor shortens: processes that wait for each other
# Seconds of engine start, and of a request.
_OWN_START_S, _VLLM_START_S, _OWN_REQUEST_S, _VLLM_REQUEST_S = 6.0, 58.0, 0.2, 3.0
_CHECKED = 3  # requests that the prefill engine also answers alone
_PATIENCE_S = 300.0
_QUESTIONS = (
    "How is a satellite started?",
    "Who is informed of a fault?",
    "What is done once a year?",
    "What is a plane?",
    "When does the box move?",
)
_COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
_PROMPTS = "vllm:request_prompt_tokens_sum"
# Counters of loaded tokens: vLLM's connector, or the project engine's prefix cache.
_LOADED = ("vllm:external_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")
_TTFT_TIMES = 2.5  # promise of the burst over the slowest sequential first token


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str = ""
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class DisaggRow:
    prompt: str
    tokens: int
    prefilled: int  # computed by the prefill engine
    moved: int  # loaded by the decode engine
    decode_computed: int
    ttft_s: float
    tbt_s: float


def run_disagg(args: argparse.Namespace) -> int:
    """Return 1 if an answer failed or differed, nothing was moved, or a refusal cost a prefill."""
    own = args.engine == "own" or (args.engine is None and not args.python.is_file())
    python = args.python if own else python_of_vllm(args.python, "; --engine own does without")
    if args.model is not None:
        check_model_folder(args.model)
    progress = Progress(sys.stderr if args.json else sys.stdout)
    # Measured on two processors: starts and requests are slowed by less than plain Python is.
    slow = math.sqrt(slowdown(time.thread_time)) * contention(2)
    start_s, request_s = (_OWN_START_S, _OWN_REQUEST_S) if own else (_VLLM_START_S, _VLLM_REQUEST_S)
    request_count = args.requests + min(_CHECKED, args.requests) + 4 + args.burst / 2
    estimate_s = _WAITS_S + slow * (start_s + request_count * request_s)
    say_estimate(progress, estimate_s)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sky-")))
        with progress.wait("making a model"):
            model = None if own else args.model or random_model(folder / "model", progress)
        with progress.wait("starting a constellation of 95 satellites and the store daemon in front of it"):
            stack.enter_context(constellation(folder))
            store = stack.enter_context(store_daemon(folder))
        roles = ("producer", "consumer")
        engines = [
            stack.enter_context(
                own_engine(folder, role, store, role)
                if model is None
                else vllm_server(python, model, folder, role, store, role)
            )
            for role in roles
        ]
        with progress.wait("starting two engines: one prefills, one decodes", start_s * slow):
            for engine in engines:
                engine.wait()
        prefill, decode = (engine.url for engine in engines)
        ways = ("--prefill", prefill, "--decode", decode)
        steps = '[disaggregation]\nsplit_from = 0\nhandover = "overlap"\n'
        plain_router = stack.enter_context(router(folder, "router", *ways, settings=steps))
        with progress.wait("starting the router"):
            plain_router.wait()
        with progress.wait("sending requests, one after the other", args.requests * request_s * slow):
            rows, same = _one_by_one(plain_router.url, prefill, decode, args.requests, progress)
        promise_s = _TTFT_TIMES * max(row.ttft_s for row in rows)
        early = f'[admission]\nrule = "early"\nttft = "{promise_s:.3f}s"\n'
        strict_router = stack.enter_context(router(folder, "strict", *ways, settings=steps + early))
        with progress.wait("starting a router that refuses early"):
            strict_router.wait()
        progress.say(f"a burst of {args.burst} requests, each with a promise of {promise_s:.2f} s to its first token")
        with progress.wait(f"sending a burst of {args.burst} requests", args.burst / 2 * request_s * slow):
            burst = _burst(strict_router.url, prefill, args.burst, promise_s)
        with progress.wait("ending all processes"):
            stack.close()
    if args.json:
        print(json.dumps({"requests": [asdict(row) for row in rows], "same_words": same, "burst": burst}))
    else:
        _print(len(rows), same, burst)
    write(format_took(progress.seconds, estimate_s), progress.stream)
    free = burst["prefilled_tokens"] <= burst["admitted_tokens"]
    return 0 if same and all(row.moved for row in rows) and burst["failed"] == 0 and free else 1


def _prompts(count: int) -> Iterator[str]:
    text = shipped_document()
    for number in range(count):
        begin = 900 * (number // 2)
        yield f"{text[begin : begin + 1800]}\n\nQuestion: {_QUESTIONS[number % len(_QUESTIONS)]}\nAnswer:"


def _one_by_one(url: str, prefill: str, decode: str, count: int, progress: Progress) -> tuple[list[DisaggRow], bool]:
    # Send requests to the router; return their rows, and True if the prefill engine alone answers the same.
    rows, same = list[DisaggRow](), True
    _send_prompt(url, "The first request takes longer. " * 40)
    # Rows are printed as they come. If they are too wide, a table cut between its columns is printed at the end.
    at_once = len(_line(_HEAD)) <= width_of(progress.stream)
    if at_once:
        progress.write(_line(_HEAD))
    for number, prompt in enumerate(_prompts(count), 1):
        before = _figures(prefill), _figures(decode)
        answer = _send_prompt(url, prompt)
        if answer.status != 200:
            raise SkyMemoryError(f"request {number} was answered {answer.status}: {answer.text[:200]}")
        row = _row(prompt, answer, before, _settled(prefill, decode, before))
        rows.append(row)
        if at_once:
            progress.write(_line(_cells(number, row)))
        if number <= _CHECKED:
            same = same and _send_prompt(prefill, prompt).text == answer.text
    if not at_once:
        table = Table(_HEAD, [_cells(number, row) for number, row in enumerate(rows, 1)], left=())
        for line in table.lines(width_of(progress.stream)):
            progress.write(line)
    return rows, same


_Figures = dict[str, float]


def _settled(prefill: str, decode: str, before: tuple[_Figures, _Figures]) -> tuple[_Figures, _Figures]:
    """Return the counters after they include the request, which may be after the answer."""
    ends_s = time.monotonic() + 5.0
    while True:
        now = _figures(prefill), _figures(decode)
        if all(
            counters[_COMPUTED + "/count"] > earlier[_COMPUTED + "/count"]
            for counters, earlier in zip(now, before, strict=True)
        ):
            return now
        if time.monotonic() > ends_s:
            return now
        time.sleep(0.05)


def _row(prompt: str, answer: Answer, before: tuple[_Figures, _Figures], now: tuple[_Figures, _Figures]) -> DisaggRow:
    def more(engine: int, name: str) -> int:
        return round(now[engine][name] - before[engine][name])

    tokens = more(1, _PROMPTS)
    moved = max(more(1, name) for name in _LOADED)
    return DisaggRow(prompt[-60:], tokens, more(0, _COMPUTED), moved, tokens - moved, answer.ttft_s, answer.tbt_s)


def _burst(url: str, prefill: str, count: int, promise_s: float) -> dict[str, float]:
    # Send ``count`` prompts at once; return how many were refused, and what the prefill engine computed.
    text = shipped_document()
    prompts = [f"Number {number}. {text[500 * number : 500 * number + 1800]}\n\nAnswer:" for number in range(count + 3)]
    for prompt in prompts[count:]:  # the router learns the engine's prefill speed
        _send_prompt(url, prompt)
    before = _figures(prefill)
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda prompt: _send_prompt(url, prompt), prompts[:count]))
    time.sleep(0.5)
    now = _figures(prefill)
    admitted = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    # A refused prompt must not be computed: all computed tokens must belong to admitted prompts.
    return {
        "requests": count,
        "admitted": len(admitted),
        "refused": len(refused),
        "failed": count - len(admitted) - len(refused),
        "without_retry_after": sum(answer.retry_after_s is None for answer in refused),
        "promise_s": promise_s,
        "kept": sum(answer.ttft_s <= promise_s for answer in admitted),
        "slowest_s": max((answer.ttft_s for answer in admitted), default=0.0),
        "prefills": round(now[_COMPUTED + "/count"] - before[_COMPUTED + "/count"]),
        "prefilled_tokens": round(now[_COMPUTED] - before[_COMPUTED]),
        "admitted_tokens": round(now[_PROMPTS] - before[_PROMPTS]),
    }


def _send_prompt(url: str, prompt: str) -> Answer:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_PATIENCE_S)
    body = {"model": "sky", "prompt": prompt, "max_tokens": _NEW_TOKENS, "temperature": 0, "stream": True}
    started_s, times, text = time.monotonic(), list[float](), ""
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            after = response.headers.get("Retry-After")
            return Answer(response.status, response.read().decode(), retry_after_s=int(after) if after else None)
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return Answer(502, json.dumps(event["error"]))
            for choice in event["choices"]:
                times.append(time.monotonic())
                text += choice["text"]
    finally:
        connection.close()
    if not times:
        return Answer(502, "the answer had no token")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Answer(200, text, times[0] - started_s, statistics.fmean(gaps) if gaps else 0.0)


_SAMPLE = re.compile(r"^([\w:]+?)(_count)?(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


def _figures(url: str) -> _Figures:
    """Return an engine's counters, summed over labels; for a histogram also ``…_sum/count``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as page:
        text = page.read().decode()
    counters: _Figures = dict.fromkeys((*_LOADED, _COMPUTED, f"{_COMPUTED}/count", _PROMPTS), 0.0)
    for name, count, value in _SAMPLE.findall(text):
        key = f"{name}_sum/count" if count else name
        if key in counters:
            counters[key] += float(value)
    return counters


# Each row is printed when its request is answered, so widths are fixed to those of the largest numbers.
_HEAD = ("request", "tokens", "prefilled", "moved", "decode computed", "first token", "between")


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(len(head)) for cell, head in zip(cells, _HEAD, strict=True))


def _cells(number: int, row: DisaggRow) -> list[str]:
    counts = (number, row.tokens, row.prefilled, row.moved, row.decode_computed)
    return [*map(str, counts), f"{row.ttft_s * 1e3:.0f} ms", f"{row.tbt_s * 1e3:.0f} ms"]


def _print(requests: int, same_words: bool, burst: dict[str, float]) -> None:
    words = "the same words as one engine alone" if same_words else "OTHER WORDS than one engine alone"
    print()
    write(f"The first {min(_CHECKED, requests)} answers have {words}.")
    write(
        f"Burst of {burst['requests']:.0f}: {burst['admitted']:.0f} admitted, {burst['kept']:.0f} of them with their "
        f"first token within {burst['promise_s']:.2f} s; {burst['refused']:.0f} refused at once (429, Retry-After), "
        f"for which nothing was prefilled: the prefill engine had {burst['prefills']:.0f} "
        f"prompt{'s' * (burst['prefills'] != 1)}."
    )
