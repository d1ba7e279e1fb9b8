"""Parameters of a generation, token sampling and detokenizing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as in OpenAI's API and vLLM."""

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    seed: int | None = None
    """None: random."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    allowed: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """Prefill by another engine; this engine fetches its blocks from the shared store."""

    tokens: int | None = None
    """Tokens with stored blocks; None: still computing."""
    wait_s: float | None = None  # for the next block; None: the engine's setting


@dataclass(frozen=True, slots=True)
class Generation:
    """Parsed completion request."""

    ids: npt.NDArray[np.int64] = field(repr=False)  # of the prompt
    max_tokens: int
    """Limit of generated tokens; prompt and answer fit into the context."""
    sampling: Sampling = Sampling()
    choices: int = 1
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    keep_stop: bool = False
    ignore_eos: bool = False
    skip_special: bool = True
    logprobs: int | None = None
    """Likeliest tokens to report; None: no log-probabilities."""
    salt: str = ""
    """Cache salt: other salts share no blocks."""
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    chat: bool = False
    request_id: str = ""
    remote_decode: bool = False
    """True if another engine decodes: this engine only prefills."""
    remote_prefill: RemotePrefill | None = None

    def each(self) -> list[Generation]:
        """Return a generation per choice, each with its own seed, as in vLLM."""
        seed = self.sampling.seed
        if self.choices == 1 or seed is None:
            return [self] * self.choices
        return [replace(self, sampling=replace(self.sampling, seed=seed + at)) for at in range(self.choices)]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Token and its log-probability in the model's own distribution."""

    token: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Output of a decoding step; the first also ends the prefill."""

    text: str
    """New text, empty while a character or stop string is incomplete."""
    completion_tokens: int
    cached_tokens: int
    finish: str | None = None
    stopped_by: str = ""
    error: str | None = None
    logprob: TokenLogprob | None = None
    """Log-probability of this token, whose text may follow later."""

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


_MIN_TEMPERATURE = 1e-5  # limit below which decoding is greedy


class Sampler:
    """Sampler of one answer; the same seed and logits give the same tokens.

    The order is vLLM's (``v1/sample/sampler.py``): allowed tokens, ``min_tokens``, bias, penalties; then greedy, or
    temperature, min_p, top_k, top_p and a random draw.
    """

    def __init__(self, generation: Generation, ends: frozenset[int]) -> None:
        self._sampling = sampling = generation.sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._min_tokens = generation.min_tokens if ends else 0
        self._ends = torch.tensor(sorted(ends), dtype=torch.long)
        bias = sampling.logit_bias
        self._biased = torch.tensor(list(bias), dtype=torch.long) if bias else None
        self._bias = torch.tensor(list(bias.values()))
        self._allowed = torch.tensor(sorted(sampling.allowed), dtype=torch.long) if sampling.allowed else None
        self._penalties = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        )
        self._prompt = torch.from_numpy(generation.ids)
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._sampled = 0

    def sample(self, logits: torch.Tensor) -> int:
        """Sample from ``logits``, shape (vocabulary,), unmodified."""
        adjusted = self._adjusted(logits)
        token = int(adjusted.argmax()) if self._sampling.temperature < _MIN_TEMPERATURE else self._draw(adjusted)
        self._sampled += 1
        if self._counts is not None and self._seen is not None:
            self._counts[token] += 1
            self._seen[token] = True
        return token

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        early = self._sampled < self._min_tokens
        if not (early or self._penalties or self._biased is not None or self._allowed is not None):
            return logits
        # A copy, because log-probabilities are computed from the same logits afterwards.
        adjusted = logits.float().cpu().clone()
        if self._allowed is not None:
            only = torch.full_like(adjusted, -math.inf)
            only[self._allowed] = adjusted[self._allowed]
            adjusted = only
        if early:
            adjusted[self._ends] = -math.inf
        if self._biased is not None:
            adjusted[self._biased] += self._bias
        return self._penalised(adjusted) if self._penalties else adjusted

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[self._prompt] = True
        sampling = self._sampling
        # Repetition penalty as in CTRL (Keskar et al., 2019); frequency and presence penalties as in OpenAI's API.
        if sampling.repetition_penalty != 1.0:
            factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
            logits = torch.where(self._seen, logits * factor, logits)
        logits = logits - sampling.frequency_penalty * self._counts
        return logits - sampling.presence_penalty * (self._counts > 0)

    def _draw(self, logits: torch.Tensor) -> int:
        sampling = self._sampling
        # On the CPU, so that a seed gives the same tokens on every device.
        scaled = logits.float().cpu() / sampling.temperature
        if sampling.min_p > 0:
            # p >= min_p * p_max in logarithms: no softmax is needed yet.
            scaled = scaled.masked_fill(scaled < scaled.max() + math.log(sampling.min_p), -math.inf)
        if 0 < sampling.top_k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -math.inf)
        chances = scaled.softmax(-1)
        if sampling.top_p < 1:
            likeliest, tokens = chances.sort(descending=True)
            # The token that reaches top_p is the last kept.
            likeliest[likeliest.cumsum(-1) - likeliest >= sampling.top_p] = 0
            return int(tokens[torch.multinomial(likeliest, 1, generator=self._generator)])
        return int(torch.multinomial(chances, 1, generator=self._generator))


_REPLACEMENT = "�"


class TextStream:
    """Incremental detokenizer; holds back text that may be part of a character or stop string."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        *,
        keep_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._window = 0  # first token to decode, for correct spaces
        self._read = 0  # tokens whose text was taken
        self._held = ""  # text held back, as a stop string may begin in it
        self._may_stop = True
        self.stopped_by = ""

    def add(self, token: int, may_stop: bool = True) -> str:
        """Add a token; return the text that later tokens cannot change, maybe empty."""
        self._may_stop = may_stop
        self._ids.append(token)
        before_text, after = self._decode(self._read), self._decode(len(self._ids))
        # A byte-level token may end inside a UTF-8 character: it decodes to a replacement character until the remaining
        # bytes arrive.
        if len(after) <= len(before_text) or after.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return self._released(self._held + after[len(before_text) :], is_final=False)

    def finish(self) -> str:
        if self.stopped_by:
            return ""
        text = self._decode(len(self._ids))[len(self._decode(self._read)) :]
        self._read = len(self._ids)
        return self._released(self._held + text, is_final=True)

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._window : end], skip_special_tokens=self._skip_special))

    def _released(self, text: str, is_final: bool) -> str:
        # Return the text that can be sent: cut at a stop string, and without an end that may begin a stop string.
        matches = [(text.find(stop), stop) for stop in self._stops if stop in text] if self._may_stop else []
        if matches:
            at, stop = min(matches)
            self.stopped_by, self._held = stop, ""
            return text[: at + len(stop)] if self._keep_stop else text[:at]
        overlap = 0 if is_final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - overlap :]
        return text[: len(text) - overlap]


def _overlap(text: str, stop: str) -> int:
    """Return the longest suffix of ``text`` that begins ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
