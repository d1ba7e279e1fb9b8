"""One request of the engine once it is read: tokens in, how to choose tokens, when to stop."""

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
    """How tokens are chosen; each field as vLLM and OpenAI define it. The defaults change nothing."""

    temperature: float = 1.0
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn from."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn from; 0: all."""
    min_p: float = 0.0
    """Only tokens with at least this part of the likeliest one's probability are drawn from."""
    seed: int | None = None
    """None draws differently each time."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Taken as often as the answer has them."""
    repetition_penalty: float = 1.0
    """What logits above 0 are divided by, and those below multiplied with, of tokens of the prompt and the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    """Added to the logits of these tokens."""
    allowed: frozenset[int] | None = None
    """No other tokens are chosen; None: any."""


@dataclass(frozen=True, slots=True)
class Generation:
    ids: npt.NDArray[np.int64] = field(repr=False)
    """The prompt, at least one token."""
    max_tokens: int
    """At least one; prompt and answer fit the context."""
    sampling: Sampling = Sampling()
    choices: int = 1
    """Answers to the one prompt."""
    min_tokens: int = 0
    """Nothing ends the answer before it has so many."""
    stops: tuple[str, ...] = ()
    """The answer ends before the first of these that it would contain."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, beside the model's own."""
    keep_stop: bool = False
    """What ended it is part of the answer."""
    ignore_eos: bool = False
    skip_special: bool = True
    """Special tokens are not shown."""
    logprobs: int | None = None
    """With each token its log-probability, and so many of the likeliest in its place; None: nothing of the kind."""
    salt: str = ""
    """Prompts of different salts never share a cache."""
    stream: bool = False
    include_usage: bool = False
    """A stream ends with a chunk that has the usage."""
    usage_in_chunks: bool = False
    """Every chunk has the usage so far."""
    chat: bool = False
    request_id: str = ""
    """What the client calls it; empty: we choose."""

    def each(self) -> list[Generation]:
        """One for each of its choices: with a seed every one draws from its own, as vLLM has it."""
        seed = self.sampling.seed
        if self.choices == 1 or seed is None:
            return [self] * self.choices
        return [replace(self, sampling=replace(self.sampling, seed=seed + at)) for at in range(self.choices)]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as text, and the logarithm of its probability by the model alone, before anything of ``Sampling``."""

    token: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...] = ()
    """Tokens with the highest, best first."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine says of a request as it goes on. The first step means: the prompt is computed."""

    text: str
    """What comes behind the text of the steps before."""
    completion_tokens: int
    """Generated so far."""
    cached_tokens: int
    """Of the prompt, what the prefix cache supplied."""
    finish: str | None = None
    """"stop" or "length" in the last step."""
    error: str | None = None
    """Why it ended before it was done; the last step, too."""
    logprob: TokenLogprob | None = None
    """Of the token of this step, where the request asks for it; its text may come with a later one."""

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


# The next token out of a model's logits: the likeliest, or drawn, after what the request adds to them.
#
# The order of the steps is vLLM's (``v1/sample/sampler.py``), so that the same fields mean the same: allowed tokens,
# no end before ``min_tokens``, bias, penalties; then the likeliest, or temperature, min_p, top_k, top_p and a draw.


_LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest is taken: dividing by less overflows, and would draw nothing else."""


class Chooser:
    """Chooses the tokens of one answer. The same seed and logits give the same tokens."""

    def __init__(self, generation: Generation, ends: frozenset[int]) -> None:
        """``ends``: tokens that end the answer, and so none of its first ``min_tokens``."""
        self._sampling = sampling = generation.sampling
        self._dice = torch.Generator()
        if sampling.seed is None:
            self._dice.seed()
        else:
            self._dice.manual_seed(sampling.seed)
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
        """How often the answer has each token, where penalties need it."""
        self._seen: torch.Tensor | None = None
        """Which tokens prompt and answer have."""
        self._chosen = 0

    def choose(self, logits: torch.Tensor) -> int:
        """``logits``: (vocabulary,); they are left as they are."""
        shaped = self._shaped(logits)
        token = int(shaped.argmax()) if self._sampling.temperature < _LEAST_TEMPERATURE else self._drawn(shaped)
        self._chosen += 1
        if self._counts is not None and self._seen is not None:
            self._counts[token] += 1
            self._seen[token] = True
        return token

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        early = self._chosen < self._min_tokens
        if not (early or self._penalties or self._biased is not None or self._allowed is not None):
            return logits
        shaped = logits.float().cpu().clone()
        if self._allowed is not None:
            only = torch.full_like(shaped, -math.inf)
            only[self._allowed] = shaped[self._allowed]
            shaped = only
        if early:
            shaped[self._ends] = -math.inf
        if self._biased is not None:
            shaped[self._biased] += self._bias
        return self._penalised(shaped) if self._penalties else shaped

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[self._prompt] = True
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
            logits = torch.where(self._seen, logits * factor, logits)
        logits = logits - sampling.frequency_penalty * self._counts
        return logits - sampling.presence_penalty * (self._counts > 0)

    def _drawn(self, logits: torch.Tensor) -> int:
        sampling = self._sampling
        scaled = logits.float().cpu() / sampling.temperature
        if sampling.min_p > 0:
            scaled = scaled.masked_fill(scaled < scaled.max() + math.log(sampling.min_p), -math.inf)
        if 0 < sampling.top_k < len(scaled):
            scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -math.inf)
        chances = scaled.softmax(-1)
        if sampling.top_p < 1:
            likeliest, tokens = chances.sort(descending=True)
            # The token that reaches top_p is the last that stays.
            likeliest[likeliest.cumsum(-1) - likeliest >= sampling.top_p] = 0
            return int(tokens[torch.multinomial(likeliest, 1, generator=self._dice)])
        return int(torch.multinomial(chances, 1, generator=self._dice))


# Tokens as text, piece by piece: no half characters, nothing of a stop text.


_REPLACEMENT = "�"


class TextStream:
    """What may be shown so far. A piece is held back while it could be part of a character or of a stop text.

    ``stopped``: the text has come to one of ``stops``; it ends before it (``keep_stop``: with it), and takes no more
    tokens.
    """

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
        self._window = 0
        """From here on tokens are decoded: new ones need those before them to get their spaces right."""
        self._read = 0
        """Tokens before this are in the text."""
        self._held = ""
        self._may_stop = True
        self.stopped = False

    def add(self, token: int, may_stop: bool = True) -> str:
        """The text that is certain now and was not before. Unless it ``may_stop``, a stop text is text like any."""
        self._may_stop = may_stop
        self._ids.append(token)
        before, now = self._decode(self._read), self._decode(len(self._ids))
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return self._released(self._held + now[len(before) :], ended=False)

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        if self.stopped:
            return ""
        rest = self._decode(len(self._ids))[len(self._decode(self._read)) :]
        self._read = len(self._ids)
        return self._released(self._held + rest, ended=True)

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._window : end], skip_special_tokens=self._skip_special))

    def _released(self, text: str, ended: bool) -> str:
        found = [(text.find(stop), stop) for stop in self._stops if stop in text] if self._may_stop else []
        if found:
            self.stopped, self._held = True, ""
            at, stop = min(found)
            return text[: at + len(stop)] if self._keep_stop else text[:at]
        keep = 0 if ended else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that ``stop`` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
