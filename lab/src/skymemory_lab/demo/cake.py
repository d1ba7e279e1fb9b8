"""``skymemory demo cake``: a prompt computed, loaded, and both at once from its two ends."""

from __future__ import annotations

import argparse
import copy
import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from skymemory.cache.cake.cake import CakeSettings
from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.engine.transformers.cake_prefill import OtherPrompts
from skymemory.engine.transformers.forward import cache_option
from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.models import TWO_SECOND_SHAPE, build_llama
from skymemory.progress import EVENT_INDENT, Progress
from skymemory.store.memory import MemoryStore
from skymemory.store.wrappers import RateLimited
from skymemory.text import Table, has_colour, wrapped, write
from skymemory.units import format_size
from skymemory_lab.demo.estimate import Estimate, EstimatedPart, format_estimate, format_took
from skymemory_lab.demo.screen import Screen

BLOCK_TOKENS, STEP_TOKENS, TAIL_TOKENS = 32, 160, 5
PROBE_TOKENS = 2 * STEP_TOKENS
SIDES = (("compute", "compute"), ("load", "load"), ("both", "cake"))
# The even rate is first: it is the rate that is drawn, and the time limit must not drop it.
RATIOS = (1.0, 0.25, 0.5, 2.0, 4.0)
# Bytes per second; faster than memory, so nothing waits.
_UNLIMITED = 1e12


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Result of a prompt up to its first new token."""

    seconds: float
    computed_tokens: int
    loaded_tokens: int
    met_at_token: int | None
    first_token: int


@dataclass(frozen=True, slots=True)
class RateRow:
    """Three ways to process the prompt at a link rate."""

    bytes_per_s: float
    ratio: float
    """Link rate over the rate at which loading and computing take equally long."""
    compute: PromptRun
    load: PromptRun
    both: PromptRun

    @property
    def of_better(self) -> float:
        return self.both.seconds / min(self.compute.seconds, self.load.seconds)


class CakeRuns:
    """A model, a prompt stored in memory, and a link of any rate to that memory."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = build_llama(TWO_SECOND_SHAPE, args.seed)
        self.link = RateLimited(MemoryStore(), _UNLIMITED)
        self.kvc = KVCManager(
            self.model,
            None,
            self.link,
            block_tokens=BLOCK_TOKENS,
            weights=f"random {args.seed}",
            cake=CakeSettings(step_tokens=STEP_TOKENS),
        )
        dice = torch.Generator().manual_seed(args.seed)
        self.ids = torch.randint(3, self.model.config.vocab_size, (1, 8192), generator=dice)
        self.share: float = args.share
        self._steps: SpeedEstimate | None = None

    def run(self, tokens: int, loading: Any, bytes_per_s: float, bars: Bars | None = None) -> PromptRun:
        """Process ``tokens`` of the prompt, and a few more, up to the first new token."""
        # The limited link still owes bytes of the previous run, which would slow this run down.
        time.sleep(self.link.backlog_s)
        self.link.bytes_per_s = bytes_per_s
        kvc, ids = self.kvc, self.ids[:, : tokens + TAIL_TOKENS]
        kvc.loading = loading
        kvc.cake.beside = None
        if self.share < 1:
            kvc.cake.beside = OtherPrompts(self.model, [self.ids[:, 64:1088]], self.share, piece_tokens=64, again=True)
        kvc.cake.on_chunks = bars.begin if bars else None
        kvc.cake.on_settled = bars.settled if bars else None
        started_s = time.perf_counter()
        cache = kvc.get_cache_ids(ids)
        with torch.inference_mode():
            inputs = {"input_ids": ids[:, cache.begin() :], **cache_option(self.model, cache)}
            logits = self.model(**inputs, logits_to_keep=1).logits
        first, seconds, loader = int(logits[0, -1].argmax()), time.perf_counter() - started_s, cache.result.loader
        computed, loaded, met = 0, 0, None
        if loader:
            computed, loaded, met = loader.computed_tokens, loader.loaded_tokens, loader.met_at_token
        return PromptRun(seconds, computed, loaded, met, first)

    def learn(self, bytes_per_s: float) -> None:
        """Measure the pace of both sides with a short prompt."""
        if self._steps is None:
            self._steps = self.kvc.cake.cake.pace = SpeedEstimate()
            self.run(PROBE_TOKENS, "compute", bytes_per_s)
        self.kvc.cake.cake.pace = copy.copy(self._steps)
        self.run(PROBE_TOKENS, "load", bytes_per_s)


PROMISED_S, QUICK_PROMISED_S = 50.0, 25.0
_AIM_S, _QUICK_AIM_S = 2.0, 0.8
_LEAST_S = 10.0
_PLANNED_SHARE = 0.8
_PROBE_S = 1.5
_MOST_PROBES = 12
_PREPARING = "storing the prompt and computing it alone"
_AROUND = 1.2  # factor for the work between the runs, measured on two cores of an Intel Xeon


def run_cake(args: argparse.Namespace, progress: Progress) -> int:
    """Return 1 if the three ways gave different tokens or did not work as intended."""
    transformers_logging.set_verbosity_error()
    with progress.wait("building a model with random weights", 1.0):
        runs = CakeRuns(args)
    with progress.wait("measuring its speed, which decides how long the prompt is", 2.0):
        runs.kvc.add_blocks_ids(runs.ids[:, :PROBE_TOKENS])
        probe_s = _probe(runs)
    promised_s = QUICK_PROMISED_S if args.quick else PROMISED_S
    left_s = max(_LEAST_S, _PLANNED_SHARE * promised_s - progress.seconds)
    tokens, ratios, seconds = plan_runs(probe_s, left_s, quick=args.quick, tokens=args.tokens)
    parts_s = _parts_s(probe_s, tokens, ratios, quick=args.quick)
    names = (_PREPARING, *map(_link, ratios))
    parts = [EstimatedPart(name, part_s, "run") for name, part_s in zip(names, parts_s, strict=True)]
    estimate = Estimate(parts, spent_s=progress.seconds)
    progress.say(f"estimate: {format_estimate(estimate.first_s)} in all")
    bars = Bars(progress)
    links = LinkRuns(ratios, estimate, bars, progress, None if args.tokens else promised_s)
    try:
        # Live bars own the terminal. Otherwise full bars are printed, with a wait between them.
        with progress.wait("computing the prompt, and loading it", seconds) if not bars.live else nullcontext():
            rows = _rows(args, runs, bars, tokens, links)
    finally:
        bars.close()
    if len(rows) < len(RATIOS):
        left_out = ", ".join(f"{ratio:g}" for ratio in RATIOS if ratio not in [row.ratio for row in rows])
        progress.say(f"left out, since this computer is too slow or too busy: links of {left_out} times the even rate")
    same = len({result.first_token for row in rows for result in (row.compute, row.load, row.both)}) == 1
    is_correct = same and all(row.compute.loaded_tokens == 0 == row.load.computed_tokens for row in rows)
    if args.json:
        print(
            json.dumps(
                {"tokens": tokens, "share": args.share, "sound": is_correct, "rows": [asdict(row) for row in rows]}
            )
        )
    else:
        print()
        _table(rows, tokens).print()
        print()
        write("every way the same next token" if same else "the ways DIFFER in their next token")
    write(format_took(progress.seconds, estimate.first_s), progress.stream)
    return 0 if is_correct else 1


def _probe(runs: CakeRuns) -> float:
    """Return the mean of many short prompts: other programs disturb single runs."""
    runs.run(PROBE_TOKENS, "compute", _UNLIMITED)  # this run also selects kernels
    started_s, count = time.perf_counter(), 0
    while time.perf_counter() - started_s < _PROBE_S:
        runs.run(PROBE_TOKENS, "compute", _UNLIMITED)
        count += 1
    return (time.perf_counter() - started_s) / count


def plan_runs(
    probe_s: float, left_s: float, *, quick: bool, tokens: int | None = None
) -> tuple[int, tuple[float, ...], float]:
    """Return the prompt's tokens, the link rates, and all runs' seconds. ``probe_s`` computes ``PROBE_TOKENS``.

    The prompt is the longest with which all rates fit into ``left_s``; if none does, the slowest rates but 1 are
    dropped.
    """
    if tokens is not None:
        tokens = tokens // STEP_TOKENS * STEP_TOKENS
        return tokens, RATIOS, _seconds_of(probe_s, tokens, RATIOS, quick=quick)
    aim_s = _QUICK_AIM_S if quick else _AIM_S
    for probes in range(min(_MOST_PROBES, max(1, round(aim_s / probe_s))), 0, -1):
        seconds = _seconds_of(probe_s, probes * PROBE_TOKENS, RATIOS, quick=quick)
        if seconds <= left_s:
            return probes * PROBE_TOKENS, RATIOS, seconds
    ratios: tuple[float, ...] = RATIOS
    while len(ratios) > 1 and _seconds_of(probe_s, PROBE_TOKENS, ratios, quick=quick) > left_s:
        slowest = min(ratios[1:])  # the slowest link takes the longest
        ratios = tuple(ratio for ratio in ratios if ratio != slowest)
    return PROBE_TOKENS, ratios, _seconds_of(probe_s, PROBE_TOKENS, ratios, quick=quick)


def _seconds_of(probe_s: float, tokens: int, ratios: Sequence[float], *, quick: bool) -> float:
    return sum(_parts_s(probe_s, tokens, ratios, quick=quick))


def _parts_s(probe_s: float, tokens: int, ratios: Sequence[float], *, quick: bool) -> list[float]:
    """Return the seconds before the first link, and those of each link."""
    compute_s = probe_s * tokens / PROBE_TOKENS
    parts_s = [4 * compute_s]
    for at, ratio in enumerate(ratios):
        computed = 1 if not at or not quick else 0
        parts_s.append(compute_s * (computed + 1 / ratio + 1 / (1 + ratio)) + probe_s * (1 / ratio + (at == 0)))
    return [_AROUND * part_s for part_s in parts_s]


def _link(ratio: float) -> str:
    return f"the link of {ratio:g} times the even rate"


class LinkRuns:
    """Link rates whose runs should end within the promised time, by those before."""

    def __init__(
        self, ratios: Sequence[float], estimate: Estimate, bars: Bars, progress: Progress, promised_s: float | None
    ) -> None:
        self._ratios, self._estimate, self._bars, self._progress = ratios, estimate, bars, progress
        self._promised_s = math.inf if promised_s is None else promised_s
        self._started_s = progress.seconds

    def on_prepared(self) -> None:
        self._on_part(_PREPARING)

    def __iter__(self) -> Iterator[float]:
        for at, ratio in enumerate(self._ratios):
            if at and self._progress.seconds + self._estimate.seconds_of(_link(ratio)) > self._promised_s:
                self._estimate.skip(_link(ratio))
                continue
            yield ratio
            self._on_part(_link(ratio))

    def _on_part(self, name: str) -> None:
        now_s = self._progress.seconds
        self._estimate.on_part(name, now_s - self._started_s)
        self._started_s = now_s
        if words := self._estimate.correction(now_s):
            self._bars.say(words)


def _rows(args: argparse.Namespace, runs: CakeRuns, bars: Bars, tokens: int, links: LinkRuns) -> list[RateRow]:
    # 1. Store the shown prompt and compute it alone. Link rates are relative to that time: at ratio 1 loading takes as
    #    long as computing, and doing both gains most.
    # 2. For each rate, learn both speeds from the probe, then compute, load and do both. The first rate is drawn.
    size_bytes = runs.kvc.add_blocks_ids(runs.ids[:, :tokens]).blocks * (128 + runs.kvc.layout.block_bytes)
    runs.kvc.warm(tokens)
    # The better of two runs: a moment of other load must not make all links slow.
    compute_s = min(runs.run(tokens, "compute", _UNLIMITED).seconds for _ in range(2))
    even = size_bytes / compute_s
    bars.title(tokens, size_bytes, even, args.share)
    links.on_prepared()
    rows: list[RateRow] = []
    for ratio in links:
        runs.learn(even * ratio)
        done = {}
        for word, loading in SIDES:
            if word == "compute" and rows and args.quick:
                done[word] = rows[0].compute  # computing does not use the link
                continue
            bars.way(word)
            done[word] = runs.run(tokens, loading, even * ratio, bars if not rows else None)
            if not rows:
                bars.show_end(done[word].seconds, done[word].met_at_token)
        rows.append(RateRow(even * ratio, ratio, done["compute"], done["load"], done["both"]))
    return sorted(rows, key=lambda row: row.bytes_per_s)


_HEAD = ("MB/s", "compute", "load", "both", "of the better", "met at", "computed | loaded")
_TABLE_BAR = 16


def _table(rows: list[RateRow], tokens: int) -> Table:
    cells = []
    for row in rows:
        met = f"{row.both.met_at_token:,}" if row.both.met_at_token is not None else "-"
        times = (f"{way.seconds:.2f} s" for way in (row.compute, row.load, row.both))
        share = row.both.computed_tokens / max(1, tokens)
        drawn = bar(math.floor(share * _TABLE_BAR + 0.5), _TABLE_BAR)
        cells.append([f"{row.bytes_per_s / 1e6:.1f}", *times, f"{row.of_better:.2f}", met, drawn])
    return Table(_HEAD, cells, left=(6,))


LEAST_WIDTH, MOST_WIDTH = 4, 56
_NAME, _WORDS = 8, len(" 99.99 s, met at token 8,000")
COMPUTED, LOADED, NOTHING = "█", "▒", "·"
_COLOURS = {COMPUTED: "\x1b[38;5;215m", LOADED: "\x1b[38;5;75m", NOTHING: "\x1b[2m"}
_PLAIN = "\x1b[0m"
_FRAME_S = 0.04
_WAYS = ("compute", "load", "both")


def bar(computed: int, width: int) -> str:
    return COMPUTED * computed + LOADED * (width - computed)


class Bars:
    """Three bars, drawn in place on a terminal, or printed as lines. Thread-safe."""

    def __init__(self, progress: Progress) -> None:
        self._screen = Screen(progress.stream, progress.began_s, line_every_s=float("inf"), progress=progress)
        self._colour = self._screen.live and has_colour(progress.stream)
        self._lock = threading.Lock()
        self._title = ""
        self._chunks: dict[str, list[str]] = {}
        self._words: dict[str, str] = {}
        self._way = ""
        self._began_s = 0.0
        self._drawn_s = 0.0

    @property
    def live(self) -> bool:
        return self._screen.live

    def title(self, tokens: int, size_bytes: int, bytes_per_s: float, share: float) -> None:
        ours = f", {share:.0%} of each step ours" if share < 1 else ""
        self._title = (
            f"{tokens:,} tokens, {format_size(size_bytes)} of keys and values, over a link of "
            f"{bytes_per_s / 1e6:.1f} MB/s: as soon loaded as computed{ours}"
        )
        self._screen.say(self._title)

    def say(self, words: str) -> None:
        with self._lock:
            self._screen.say(words)

    def way(self, word: str) -> None:
        """Select the next bar, or none if this way is complete already."""
        with self._lock:
            self._way = word if word not in self._words else ""

    def begin(self, chunks: int) -> None:
        with self._lock:
            self._chunks[self._way] = [NOTHING] * chunks
            self._began_s = time.monotonic()
            self._draw()

    def settled(self, index: int, origin: str) -> None:
        with self._lock:
            self._chunks[self._way][index] = COMPUTED if origin == "computed" else LOADED
            if time.monotonic() - self._drawn_s >= _FRAME_S:
                self._draw()

    def show_end(self, seconds: float, met_at_token: int | None) -> None:
        with self._lock:
            met = f", met at token {met_at_token:,}" if met_at_token is not None else ""
            self._words[self._way] = f"{seconds:.2f} s{met}"
            self._draw()
            if not self._screen.live:
                self._screen.say(self._line(self._way, self._words[self._way], self._screen.width - EVENT_INDENT))

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        if self._screen.live:
            self._screen.show(self._frame)

    # Called by the screen's thread as well, without the lock, so it only reads.
    def _frame(self, width: int) -> list[str]:
        lines = []
        for way in _WAYS:
            words = self._words.get(way, "")
            if way == self._way and not words:
                words = f"{time.monotonic() - self._began_s:.2f} s"
            lines.append(self._line(way, words, width))
        return [
            *wrapped(self._title, width),
            "",
            *lines,
            f"{self._paint(COMPUTED)} computed  {self._paint(LOADED)} loaded",
        ]

    def _line(self, way: str, words: str, width: int) -> str:
        label_width = _NAME + max(_WORDS, *(1 + len(text) for text in [words, *self._words.values()]))
        return f"{way:<{_NAME}}{self._bar(way, max(LEAST_WIDTH, min(MOST_WIDTH, width - label_width)))} {words}"

    def _bar(self, way: str, width: int) -> str:
        chunks = self._chunks.get(way) or [NOTHING]
        columns = [chunks[at * len(chunks) // width] for at in range(width)]
        return "".join(self._paint(part) for part in columns)

    def _paint(self, mark: str) -> str:
        return f"{_COLOURS[mark]}{mark}{_PLAIN}" if self._colour else mark

    def close(self) -> None:
        with self._lock:
            self._screen.close()
