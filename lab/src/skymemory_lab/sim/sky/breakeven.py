"""Break-even of loading a prompt's KV against computing it, by prefill speed, link rate and prompt length.

``compute`` has a constant speed, ``load`` the physical model, ``both`` the production loader (``cache.cake``) in
virtual time. In reality later steps are slower, so ``both`` saves more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skymemory.cache.cake.scheduler import PromptChunk
from skymemory.config import suggestion
from skymemory.errors import InvalidInput
from skymemory.files import MAX_TABLE_BYTES, read_json
from skymemory_lab.sim.loading import A100, H100, PAPER_STEP_TOKENS, PAPER_TOKEN_BYTES, LinkTrace, simulate_load
from skymemory_lab.sim.sky.bound import lower_bound_s
from skymemory_lab.sim.sky.physical import LinkRates, TransferSetting, Ways, latency_s

Best = Literal["compute", "load", "both"]
WORTH = 0.05
"""Least share that ``both`` must save to be chosen."""
STEP_TOKENS = PAPER_STEP_TOKENS
KV_BYTES_PER_TOKEN = {
    "tinyllama-1.1b": 2 * 22 * 4 * 64 * 2,
    "qwen2.5-7b": 2 * 28 * 4 * 128 * 2,
    "llama-3.1-8b": 2 * 32 * 8 * 128 * 2,
    "llama-3.1-70b": 2 * 80 * 8 * 128 * 2,
    "longalpaca-7b": PAPER_TOKEN_BYTES,
}
"""KV bytes per token: 2 · layers · KV heads · head width · 2 bytes; last, the Cake paper's model."""
MEASURED_FILE = Path(__file__).parent / "measured.json"
_FORMAT = "skymemory-prefill/1"
_IN_FLIGHT_STEPS = 4


@dataclass(frozen=True, slots=True)
class BreakevenCell:
    """Seconds to have a prompt's KV: computed, loaded (at least ``load_bound_s``), or both at once."""

    tokens: int
    tokens_per_s: float
    rate_bit_s: float
    compute_s: float
    load_s: float
    load_bound_s: float
    both_s: float
    best: Best

    @property
    def saved(self) -> float:
        return 1 - min(self.compute_s, self.load_s, self.both_s) / self.compute_s


@dataclass(frozen=True, slots=True)
class Measured:
    """Prefill times of an engine: prompt tokens and seconds."""

    name: str
    device: str
    model: str
    kv_bytes_per_token: int
    prefill: tuple[tuple[int, float], ...]
    source: str

    def nearest(self, tokens: int) -> tuple[int, float]:
        """Return the measured length nearest to ``tokens``, and its tokens per second."""
        length, seconds = min(self.prefill, key=lambda pair: abs(math.log(pair[0] / tokens)))
        return length, length / seconds


@dataclass(frozen=True)
class Break:
    load_s: float
    bound_s: float  # no protocol is faster
    trace: LinkTrace  # with the model's latencies of a prefill step's KV and of the prompt's


class BreakEven:
    """Comparison of loading with computing, over the paths ``ways``; the value size of ``setting`` is not used."""

    def __init__(self, ways: Ways, setting: TransferSetting, rates: LinkRates) -> None:
        self.rates = rates
        self._ways, self._setting = ways, setting
        self._link = lru_cache(maxsize=4096)(self._link_of)

    def _link_of(self, value_bytes: int, step_bytes: int, rate_bit_s: float) -> Break:
        # On board there is no beam, so the rate of the host's inter-satellite links is varied.
        varied = "isl_bit_s" if self._ways.access == "onboard" else "down_bit_s"
        rates = replace(self.rates, **{varied: rate_bit_s})
        prompt, step = (
            replace(self._setting, value_bytes=size) for size in (value_bytes, min(step_bytes, value_bytes))
        )
        prompt_s, step_s = (float(np.median(latency_s(self._ways, setting, rates))) for setting in (prompt, step))
        bound_s = float(np.median(lower_bound_s(self._ways, prompt, rates)))
        more_bytes, more_s = prompt.value_bytes - step.value_bytes, prompt_s - step_s
        rate = more_bytes / more_s if more_bytes and more_s > 0 else step.value_bytes / max(step_s, 1e-12)
        return Break(prompt_s, bound_s, LinkTrace.constant(rate, max(0.0, step_s - step.value_bytes / rate)))

    def cell(self, tokens: int, tokens_per_s: float, rate_bit_s: float, kv_bytes_per_token: int) -> BreakevenCell:
        """Compare the three ways for a prompt."""
        named = {"tokens": tokens, "tokens a second": tokens_per_s, "KV bytes a token": kv_bytes_per_token}
        for name, value in named.items():
            if not 0 < value < math.inf:
                raise InvalidInput(f"{value:g} {name}: expected more than 0")
        LinkRates(down_bit_s=rate_bit_s)
        link = self._link(tokens * kv_bytes_per_token, STEP_TOKENS * kv_bytes_per_token, rate_bit_s)
        steps = [(first, min(STEP_TOKENS, tokens - first)) for first in range(0, tokens, STEP_TOKENS)]
        chunks = [PromptChunk(first, count, count * kv_bytes_per_token, True) for first, count in steps]
        both_s = simulate_load(
            chunks,
            lambda first, count: count / tokens_per_s,
            link.trace,
            budget_tokens=STEP_TOKENS,
            max_in_flight_bytes=_IN_FLIGHT_STEPS * STEP_TOKENS * kv_bytes_per_token,
        ).ttft_s
        compute_s, load_s = tokens / tokens_per_s, link.load_s
        best: Best = "compute" if compute_s <= load_s else "load"
        if both_s < (1 - WORTH) * min(compute_s, load_s):
            best = "both"
        return BreakevenCell(tokens, tokens_per_s, rate_bit_s, compute_s, load_s, link.bound_s, both_s, best)

    def grid(
        self,
        lengths: Sequence[int],
        speeds: Sequence[float],
        rates_bit_s: Sequence[float],
        kv_bytes_per_token: int,
    ) -> list[BreakevenCell]:
        return [
            self.cell(tokens, speed, rate, kv_bytes_per_token)
            for tokens in lengths
            for speed in speeds
            for rate in rates_bit_s
        ]

    def even_bit_s(self, tokens: int, tokens_per_s: float, kv_bytes_per_token: int) -> float:
        """Return the link rate at which loading takes as long as computing; infinite if light takes longer."""
        low, high = 1e3, 1e15
        compute_s = tokens / tokens_per_s
        step_bytes = STEP_TOKENS * kv_bytes_per_token
        if self._link(tokens * kv_bytes_per_token, step_bytes, high).load_s > compute_s:
            return math.inf
        for _ in range(32):
            middle = math.sqrt(low * high)
            slower = self._link(tokens * kv_bytes_per_token, step_bytes, middle).load_s > compute_s
            low, high = (middle, high) if slower else (low, middle)
        return high


def kv_bytes_of(model: str) -> int:
    if model.isdecimal() and int(model) > 0:
        return int(model)
    bytes_per_token = KV_BYTES_PER_TOKEN.get(model.lower())
    if bytes_per_token is None:
        raise InvalidInput(
            f"no model is called {model!r}; {suggestion(model.lower(), KV_BYTES_PER_TOKEN)}, or KV bytes a token"
        )
    return bytes_per_token


def fitted_gpus() -> list[Measured]:
    """Return the Cake paper's two GPUs as fitted to its savings; not measurements."""
    lengths = (2048, 8192, 32_768)
    return [
        Measured(
            f"{gpu.name}, fitted to the Cake paper",
            gpu.name,
            "LongAlpaca-7B",
            PAPER_TOKEN_BYTES,
            tuple((tokens, gpu.prompt_s(tokens)) for tokens in lengths),
            "skymemory reproduce cake",
        )
        for gpu in (A100, H100)
    ]


def read_measured(path: Path = MEASURED_FILE) -> list[Measured]:
    """Read measured engines from a JSON file.

    ``{"format": "skymemory-prefill/1", "points": [{"name", "device", "model", "kv_bytes_per_token", "prefill":
    [[tokens, seconds], …], "source"}, …]}``.
    """
    content = read_json(path, f"measured engines, format {_FORMAT}", MAX_TABLE_BYTES)
    if content.get("format") != _FORMAT or not isinstance(content.get("points"), list):
        raise InvalidInput(f'{path}: expected {{"format": "{_FORMAT}", "points": […]}}')
    return [_measured(point, f"{path}, point {number}") for number, point in enumerate(content["points"], start=1)]


def _measured(point: Any, where: str) -> Measured:
    try:
        texts = [str(point[name]) for name in ("name", "device", "model", "source")]
        bytes_per_token = int(point["kv_bytes_per_token"])
        pairs = tuple((int(tokens), float(seconds)) for tokens, seconds in point["prefill"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(
            f"{where}: expected name, device, model, source, kv_bytes_per_token and prefill, pairs of tokens and "
            f"seconds ({error!r})"
        ) from error
    if not pairs or bytes_per_token < 1 or any(tokens < 1 or not 0 < seconds < math.inf for tokens, seconds in pairs):
        raise InvalidInput(f"{where}: expected KV bytes, tokens and seconds of more than 0, and at least one pair")
    return Measured(texts[0], texts[1], texts[2], bytes_per_token, pairs, texts[3])
