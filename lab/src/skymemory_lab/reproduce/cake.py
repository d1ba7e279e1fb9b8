"""Figures of the Cake paper, computed by our loader in virtual time.

Settings are those of its section 5: LongAlpaca-7B, steps of 512 tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, median
from typing import Literal

from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import PromptChunk
from skymemory.errors import InvalidInput
from skymemory_lab.sim.loading import (
    A100,
    A100_SHARED,
    H100,
    PAPER_STEP_TOKENS,
    PAPER_TOKEN_BYTES,
    LinkTrace,
    PrefillModel,
    SimulatedLoad,
    best_split_s,
    share_tokens,
    simulate_load,
    with_share,
)

MBIT_BYTES = 125_000
PAPER_MBIT = (2_000, 5_000, 10_000)
CODECS = {"raw": 1.0, "8 bit": 1.95, "CacheGen": 7.97}
"""Transfer speed-up of each codec, as the paper measured it (section 5.4)."""
_KNOWN = 3  # number of warm-up prompts


@dataclass(frozen=True, slots=True)
class CakeRun:
    """Seconds to the complete prompt: computed alone, loaded alone, by Cake, and with the best split in hindsight."""

    compute_s: float
    load_s: float
    cake_s: float
    hindsight_s: float
    computed_share: float

    @property
    def saved_of_compute(self) -> float:
        return 1 - self.cake_s / self.compute_s

    @property
    def saved_of_load(self) -> float:
        return 1 - self.cake_s / self.load_s


def prompt_chunks(tokens: int, chunk_tokens: int, token_bytes: float = PAPER_TOKEN_BYTES) -> tuple[PromptChunk, ...]:
    sizes = [(at, min(chunk_tokens, tokens - at)) for at in range(0, tokens, chunk_tokens)]
    return tuple(PromptChunk(at, count, round(count * token_bytes), True) for at, count in sizes)


def load_with_cake(
    gpu: PrefillModel,
    tokens: int,
    trace: LinkTrace,
    *,
    budget_tokens: int = PAPER_STEP_TOKENS,
    chunk_tokens: int = PAPER_STEP_TOKENS,
    pace: SpeedEstimate | None = None,
    codec: str = "raw",
    max_in_flight_bytes: int = 1,
    timer: Callable[[], float] | None = None,
) -> SimulatedLoad:
    """Run our loader for a prompt; by default with one fetch at a time, as in the paper."""
    chunks = prompt_chunks(tokens, chunk_tokens, PAPER_TOKEN_BYTES / CODECS[codec])
    return simulate_load(
        chunks,
        gpu.step_s,
        trace,
        budget_tokens=budget_tokens,
        max_in_flight_bytes=max_in_flight_bytes,
        pace=pace,
        # With a share of the GPU, other prompts fill each step, so that it takes as long as a full step.
        others_fill=budget_tokens < PAPER_STEP_TOKENS,
        timer=timer,
    )


@lru_cache(maxsize=4096)
def cake_run(
    gpu: PrefillModel, share: float, tokens: int, mbit_per_s: int, codec: str = "raw", chunk_tokens: int | None = None
) -> CakeRun:
    """Return all variants in a setting. A chunk is a step's budget (appendix B)."""
    model, budget = with_share(gpu, share), share_tokens(share)
    size, trace = chunk_tokens or budget, LinkTrace.constant(mbit_per_s * MBIT_BYTES)
    pace = SpeedEstimate()
    # The last prompt counts: by then the loader knows both speeds.
    for _ in range(_KNOWN):
        run = load_with_cake(model, tokens, trace, budget_tokens=budget, chunk_tokens=size, pace=pace, codec=codec)
    chunks = prompt_chunks(tokens, size, PAPER_TOKEN_BYTES / CODECS[codec])
    return CakeRun(
        compute_s=model.prompt_s(tokens, budget),
        load_s=trace.finish_s(0.0, sum(chunk.size_bytes for chunk in chunks)),
        cake_s=run.ttft_s,
        hindsight_s=best_split_s(chunks, model.step_s, trace, budget_tokens=budget),
        computed_share=run.result.computed_tokens / tokens,
    )


def fluid_run(gpu: PrefillModel, tokens: int, mbit_per_s: int) -> CakeRun:
    """Return ``cake_run`` on a whole GPU in the limit without chunks."""
    load_token_s = PAPER_TOKEN_BYTES / (mbit_per_s * MBIT_BYTES)
    # Computing x tokens from the front takes token_s·x + pair_s·x² (attention grows with the tokens before);
    # loading the others takes load_token_s each. Both end together at the positive root of:
    # token_s·x + pair_s·x² = load_token_s·(tokens − x)
    linear = gpu.token_s + load_token_s
    root = (linear * linear + 4 * gpu.pair_s * load_token_s * tokens) ** 0.5
    computed = 2 * load_token_s * tokens / (linear + root)
    cake_s = gpu.token_s * computed + gpu.pair_s * computed * computed
    return CakeRun(gpu.prompt_s(tokens), load_token_s * tokens, cake_s, cake_s, computed / tokens)


Kind = Literal["fitted", "ours", "measured"]
GPUS = (A100, H100)
SHARES = (0.1, 0.5, 0.9)
_32K, _16K, _14K, _9K = 32_768, 16_384, 14_336, 9_216
_LENGTHS = (2_048, 4_096, 8_192, 12_288, 16_384, 20_480, 24_576, 28_672, 32_768)
# LongAlpaca-13B, scaled by the ratios of weights and of layers × width.
_13B = A100.for_larger_model("A100", 13.0 / 6.74, (40 * 5120) / (32 * 4096))
_13B_TOKEN_BYTES = 2 * 40 * 5120 * 2
# GB/s, from the paper's section 3 (which equates 20 Gbit/s with 3 GB/s).
_DEVICES = {"HDD": 0.2, "SATA SSD": 0.6, "NVMe SSD": 3.0, "network, 20 Gbit/s": 2.5}


@dataclass(frozen=True, slots=True)
class Headline:
    what: str
    unit: str
    """Unit; deviations of ``%`` and ``points`` are differences, others ratios."""
    paper: float
    ours: float
    kind: Kind = "ours"
    """Origin of ours; ``fitted``: the GPU's model is fitted to it, so agreement says little."""
    note: str = ""

    @property
    def deviation(self) -> str:
        points = self.unit in ("%", "points")
        difference = self.ours - self.paper if points else (self.ours / self.paper - 1) * 100
        return f"{round(difference, 1) + 0.0:+.1f} {'points' if points else '%'}"


@dataclass(frozen=True, slots=True)
class Reproduction:
    figure: int
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    headlines: tuple[Headline, ...]


def figure_1() -> Reproduction:
    """Return the loading time of 32k tokens from each device, alone and with Cake."""
    rows: list[tuple[object, ...]] = []
    for name, gb_per_s in sorted(_DEVICES.items(), key=lambda device: device[1]):
        run = cake_run(A100, 1.0, _32K, round(gb_per_s * 8_000))
        rows.append((name, gb_per_s, run.load_s, run.compute_s, run.cake_s, run.computed_share))
    return Reproduction(
        1,
        "Workflow with a prefix cache, and its loading phase for 32k tokens",
        ("device", "gb_per_s", "load_s", "compute_s", "cake_s", "computed_share"),
        tuple(rows),
        (),
    )


def figure_4() -> Reproduction:
    """Return origin and time of each chunk of 16k tokens (A100, 10,000 Mbit/s)."""
    chunks = prompt_chunks(_16K, PAPER_STEP_TOKENS)
    steps: list[int] = []

    def step_s(first_token: int, tokens: int) -> float:
        steps.append(first_token // PAPER_STEP_TOKENS)
        return A100.step_s(first_token, tokens)

    link = LinkTrace.constant(PAPER_MBIT[-1] * MBIT_BYTES)
    pace = SpeedEstimate()
    for _ in range(_KNOWN):
        steps.clear()
        run = simulate_load(
            chunks, step_s, link, budget_tokens=PAPER_STEP_TOKENS, max_in_flight_bytes=1, pace=pace, others_fill=False
        )
    # Neither side pauses before they meet: a chunk is ready once all earlier chunks of its side are.
    ready_s: dict[int, float] = {}
    now_s = 0.0
    for index in steps:
        now_s += A100.step_s(chunks[index].first_token, chunks[index].tokens)
        ready_s.setdefault(index, now_s)
    now_s = 0.0
    for index in reversed(range(len(chunks))):
        if run.origins[index] == "loaded":
            now_s = link.finish_s(now_s, chunks[index].size_bytes)
            ready_s[index] = now_s
    rows = tuple((index, run.origins[index], ready_s[index]) for index in range(len(chunks)))
    return Reproduction(4, "Computed from the front, loaded from the back", ("chunk", "origin", "ready_s"), rows, ())


def figure_2() -> Reproduction:
    """Return the bandwidth at which loading is as fast as computing 32k tokens."""
    rows: list[tuple[object, ...]] = []
    for name, model, token_bytes in (("7B", A100, PAPER_TOKEN_BYTES), ("13B", _13B, _13B_TOKEN_BYTES)):
        rows.append((name, "A100, 100 %", _32K * token_bytes / model.prompt_s(_32K) / 1e9))
    rows.append(("7B", "H100, 100 %", _32K * PAPER_TOKEN_BYTES / H100.prompt_s(_32K) / 1e9))
    for share in reversed(SHARES):
        seconds = A100_SHARED.prompt_s(_32K, share_tokens(share))
        rows.append(("7B", f"A100, {share:.0%}".replace("%", " %"), _32K * PAPER_TOKEN_BYTES / seconds / 1e9))
    rows += [("any", name, rate) for name, rate in _DEVICES.items()]
    a100 = rows[0][2]
    assert isinstance(a100, float)
    return Reproduction(
        2,
        "Equivalent bandwidth of computing a KV cache",
        ("model", "source", "gb_per_s"),
        tuple(rows),
        (
            Headline('A100 beside an NVMe SSD ("comparable")', "×", 1.0, a100 / 3.0),
            Headline('A100 beside 20 Gbit/s ("comparable")', "×", 1.0, a100 / 2.5),
        ),
    )


def figure_3() -> Reproduction:
    steps = range(0, _32K, PAPER_STEP_TOKENS)
    rows = tuple(
        (
            number,
            A100.step_s(first, PAPER_STEP_TOKENS) * 1e3,
            H100.step_s(first, PAPER_STEP_TOKENS) * 1e3,
            (first + PAPER_STEP_TOKENS) * PAPER_TOKEN_BYTES / 1e9,
        )
        for number, first in enumerate(steps)
    )
    return Reproduction(
        3,
        "Time of a prefill step against its index",
        ("chunk", "a100_ms", "h100_ms", "kv_gb"),
        rows,
        (Headline("10,000 tokens on an A100", "s", 1.0, A100.prompt_s(10_000), note='"approximately"'),),
    )


def figure_5() -> Reproduction:
    """Return results of whole GPUs: 32k tokens at three rates, 2k to 32k tokens at 10000 Mbit/s."""
    rows: list[tuple[object, ...]] = []
    runs: dict[tuple[str, int], CakeRun] = {}
    for gpu in GPUS:
        for mbit in PAPER_MBIT:
            run = runs[gpu.name, mbit] = cake_run(gpu, 1.0, _32K, mbit)
            rows.append(_row("a", gpu.name, _32K, mbit, 512, run))
    grains: dict[str, Callable[[int], CakeRun]] = {
        "512": lambda tokens: cake_run(A100, 1.0, tokens, 10_000),
        "128": lambda tokens: cake_run(A100, 1.0, tokens, 10_000, chunk_tokens=128),
        "none": lambda tokens: fluid_run(A100, tokens, 10_000),
    }
    # The paper does not say if it counts whole chunks; three grains show how much of the fall is due to that.
    falls: dict[str, tuple[float, float]] = {}
    for grain, of in grains.items():
        for tokens in _LENGTHS:
            rows.append(_row("b", "A100", tokens, 10_000, grain, of(tokens)))
        short, long = of(_LENGTHS[0]), of(_32K)
        falls[grain] = (short.computed_share - long.computed_share, long.saved_of_compute - short.saved_of_compute)
    at = {gpu.name: [runs[gpu.name, mbit] for mbit in PAPER_MBIT] for gpu in GPUS}
    headlines = []
    for name, low, high, most in (("A100", 76.9, 93.5, 31.5), ("H100", 80.2, 94.6, 26.7)):
        saved = [run.saved_of_load for run in at[name]]
        headlines += [
            Headline(f"{name}: saved of I/O alone, least", "%", low, min(saved) * 100, "fitted"),
            Headline(f"{name}: saved of I/O alone, most", "%", high, max(saved) * 100),
            Headline(
                f"{name}: saved of computing alone, most",
                "%",
                most,
                max(run.saved_of_compute for run in at[name]) * 100,
                "fitted",
            ),
        ]
    for grain, words in (("none", "no chunks"), ("128", "chunks of 128 tokens"), ("512", "chunks of 512 tokens")):
        share, ttft = falls[grain]
        note = "the limit of small chunks" if grain == "none" else ""
        headlines += [
            Headline(f"computed share falls from 2k to 32k, {words}", "points", 10.0, share * 100, note=note),
            Headline(f"relative TTFT falls from 2k to 32k, {words}", "points", 15.0, ttft * 100, note=note),
        ]
    headlines.append(
        Headline("tokens computed at 32k, 10000 Mbit/s", "%", 75.0, runs["A100", 10_000].computed_share * 100)
    )
    return Reproduction(5, "Cake with a whole GPU", _HEADER, tuple(rows), tuple(headlines))


_HEADER = (
    "panel",
    "gpu",
    "tokens",
    "mbit_per_s",
    "chunk_tokens",
    "compute_s",
    "load_s",
    "cake_s",
    "hindsight_s",
    "computed_share",
)


def _row(panel: str, gpu: str, tokens: int, mbit: int, grain: object, run: CakeRun) -> tuple[object, ...]:
    return (panel, gpu, tokens, mbit, grain, run.compute_s, run.load_s, run.cake_s, run.hindsight_s, run.computed_share)


def _parts(tokens: int) -> dict[tuple[float, int, str], CakeRun]:
    # Return runs by the A100's share, Mbit/s and codec.
    return {
        (share, mbit, codec): cake_run(A100, share, tokens, mbit, codec)
        for share in SHARES
        for mbit in PAPER_MBIT
        for codec in CODECS
    }


def _part_rows(tokens: int) -> list[tuple[object, ...]]:
    return [
        (codec, *_row(f"{share:g}", "A100", tokens, mbit, share_tokens(share), run))
        for (share, mbit, codec), run in _parts(tokens).items()
    ]


_PART_HEADER = ("codec", "share", *_HEADER[1:])


def figure_6() -> Reproduction:
    """Return 14k tokens on a share of an A100, raw and with two codecs."""
    runs = _parts(_14K)
    raw = [run for (_, _, codec), run in runs.items() if codec == "raw"]
    tenth = [run for (share, _, codec), run in runs.items() if codec == "raw" and share == 0.1]
    packed = [
        1 - run.cake_s / runs[share, mbit, "raw"].cake_s
        for (share, mbit, codec), run in runs.items()
        if codec == "CacheGen"
    ]
    slow, fast = runs[0.1, 5_000, "raw"].compute_s, runs[0.9, 5_000, "raw"].compute_s
    twelve = runs[0.1, 5_000, "CacheGen"]
    return Reproduction(
        6,
        "14k tokens with a part of an A100",
        _PART_HEADER,
        tuple(_part_rows(_14K)),
        (
            Headline("computing alone, 10 % beside 90 %", "×", 8.22, slow / fast, "fitted"),
            Headline("computing alone, 10 % beside 90 %: added", "s", 14.34, slow - fast, "fitted"),
            Headline("saved of computing alone, least", "%", 5.3, min(r.saved_of_compute for r in raw) * 100),
            Headline("saved of computing alone, most", "%", 68.1, max(r.saved_of_compute for r in raw) * 100),
            Headline("saved of I/O alone, least", "%", 27.4, min(r.saved_of_load for r in raw) * 100),
            Headline("saved of I/O alone, most", "%", 93.7, max(r.saved_of_load for r in raw) * 100),
            Headline("saved of I/O alone at 10 %, most", "%", 65.1, max(r.saved_of_load for r in tenth) * 100),
            Headline(
                "CacheGen at 10 %, beside computing alone",
                "×",
                11.83,
                twelve.compute_s / twelve.cake_s,
                note="at 5000 Mbit/s; the paper does not say at which",
            ),
            Headline("Cake with CacheGen, saved of raw Cake, least", "%", 32.8, min(packed) * 100),
            Headline("Cake with CacheGen, saved of raw Cake, most", "%", 73.5, max(packed) * 100),
            Headline(
                "CacheGen at 90 %, saved of fetching alone",
                "%",
                66.4,
                runs[0.9, 2_000, "CacheGen"].saved_of_load * 100,
                note="at 2000 Mbit/s; the paper does not say at which",
            ),
        ),
    )


def figure_8(seed: int = 0) -> Reproduction:
    """Return 9k and 14k tokens on a share of an A100, and averages over 20 prompts of 5k to 16k tokens.

    The paper does not state the averages' settings; ours: all rates, and 10, 50 and 90 %.
    """
    # Seeded, so that the printed averages are the same on every computer.
    draw = random.Random(seed)
    lengths = [draw.randint(5_000, 16_000) for _ in range(20)]
    runs = [cake_run(A100, share, tokens, mbit) for tokens in lengths for share in SHARES for mbit in PAPER_MBIT]
    return Reproduction(
        8,
        "9k and 14k tokens with a part of an A100",
        _PART_HEADER,
        tuple(_part_rows(_9K) + _part_rows(_14K)),
        (
            Headline("average saved of computing alone", "%", 36.7, mean(r.saved_of_compute for r in runs) * 100),
            Headline("average saved of I/O alone", "%", 60.55, mean(r.saved_of_load for r in runs) * 100),
        ),
    )


def figure_7(repeats: int = 3) -> Reproduction:
    """Return the time of each step with and without the loader, measured here."""
    rows: list[tuple[object, ...]] = []
    headlines = []
    for gpu in GPUS:
        trace = LinkTrace.constant(1.0)  # so slow that everything is computed
        takes = [load_with_cake(gpu, _32K, trace, timer=time.perf_counter).scheduling_s for _ in range(repeats)]
        # The minimum over the repeats of each step, since other load on this computer only adds time.
        ours = [min(step) for step in zip(*takes, strict=True)]
        steps_s = [gpu.step_s(first, PAPER_STEP_TOKENS) for first in range(0, _32K, PAPER_STEP_TOKENS)]
        rows += [
            (gpu.name, at, step_s * 1e3, (step_s + own_s) * 1e3, own_s * 1e6)
            for at, (step_s, own_s) in enumerate(zip(steps_s, ours, strict=True))
        ]
        part = median(own_s / step_s for step_s, own_s in zip(steps_s, ours, strict=True))
        headlines.append(
            Headline(f'{gpu.name}: a step is longer by, in the median ("negligible")', "%", 0.0, part * 100, "measured")
        )
    return Reproduction(
        7,
        "A step's time with and without Cake",
        ("gpu", "chunk", "without_ms", "with_ms", "loader_us"),
        tuple(rows),
        tuple(headlines),
    )


FIGURES: dict[int, Callable[[], Reproduction]] = {
    1: figure_1,
    2: figure_2,
    3: figure_3,
    4: figure_4,
    5: figure_5,
    6: figure_6,
    7: figure_7,
    8: figure_8,
}


def reproduce(numbers: Sequence[int]) -> list[Reproduction]:
    """Return these figures in this order."""
    for number in numbers:
        if number not in FIGURES:
            known = ", ".join(map(str, FIGURES))
            raise InvalidInput(f"figure {number} of the Cake paper is not reproduced; expected one of {known}")
    return [FIGURES[number]() for number in numbers]
