"""The thread that computes: prompts first come, first served, one at a time; answers go on in between."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.prompts import forward_options
from skymemory.serving.engine.caches import OpenPrompt, PrefixCaches
from skymemory.serving.engine.generation import Chooser, Generation, Step, TextStream, TokenLogprob
from skymemory.serving.engine.metrics import Tally

PREFILL_TOKENS = 256
"""Tokens of a prompt between one look at the answers in progress, and at who has gone away, and the next."""


@dataclass(slots=True, eq=False)
class Job:
    """One request. ``tell`` is called in the engine's thread with each step."""

    generation: Generation
    tell: Callable[[Step], object]
    cancelled: bool = False
    """Set by whoever waits for it, when nobody does any longer."""
    came_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    sequence: Sequence
    began_s: float
    """When its prefill did."""
    prefill_s: float | None = None
    """What that took, once it is over."""


class Full(Exception):
    """As many requests wait as may."""


class EngineThread:
    """Serves jobs until closed. ``submit``, ``clear_cache`` and the counts may be used from any thread.

    At most ``most_running`` prompts are in the model's memory at a time, ``most_waiting`` more in line.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        caches: PrefixCaches,
        tally: Tally,
        *,
        most_running: int,
        most_waiting: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._caches = caches
        self._tally = tally
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._eos = _end_tokens(model, tokenizer)
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._prefilling: _Running | None = None
        self._running: list[_Running] = []
        self._clearings: list[Future[int]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running) + (self._prefilling is not None)

    @property
    def held_tokens(self) -> int:
        """Tokens in the caches of prompts that are being served."""
        prefilling = self._prefilling
        busy = [*self._running, *([prefilling] if prefilling else [])]
        return sum(one.sequence.tokens for one in busy)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def submit(self, *jobs: Job) -> None:
        """Put all of them in line. Raises Full, and takes none, where the line is as long as it may be."""
        with self._change:
            if len(self._waiting) >= self._most_waiting:
                raise Full
            self._waiting.extend(jobs)
            self._change.notify()

    def cancel(self, *jobs: Job) -> None:
        """Nobody waits for their answers any more: they end at the next look, at most a piece of a prompt from now."""
        for job in jobs:
            job.cancelled = True
        with self._change:
            self._change.notify()

    def clear_cache(self) -> Future[int]:
        """Forget all blocks, between two steps of whatever goes on; resolves to their number."""
        future: Future[int] = Future()
        with self._change:
            self._clearings.append(future)
            self._change.notify()
        return future

    def close(self) -> None:
        """Stop after the step in progress; what was not finished ends with an error."""
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            while self._clearings:
                self._clearings.pop(0).set_result(self._caches.clear())
            self._drop_cancelled()
            self._prefill()
            for one in list(self._running):
                self._guarded(one, self._decode)
        for job in [*(one.job for one in self._busy()), *self._waiting]:
            self._end(job, Step("", 0, 0, error="the engine is stopping"), "abort")
        self._prefilling, self._running = None, []
        self._waiting.clear()

    def _busy(self) -> list[_Running]:
        return [*([self._prefilling] if self._prefilling else []), *self._running]

    def _wait(self) -> bool:
        """Until there is something to do; False to stop."""
        with self._change:
            self._change.wait_for(
                lambda: self._stopping or self._clearings or self._waiting or self._prefilling or self._running
            )
            return not self._stopping

    def _drop_cancelled(self) -> None:
        with self._change:
            gone = [job for job in self._waiting if job.cancelled]
            for job in gone:
                self._waiting.remove(job)
        for _ in gone:
            self._tally.ended("abort")
        for one in self._busy():
            if one.job.cancelled:
                self._guarded(one, self._abandon)

    def _prefill(self) -> None:
        if self._prefilling is None and len(self._running) < self._most_running:
            with self._change:
                job = self._waiting.popleft() if self._waiting else None
            if job is not None:
                self._begin(job)
        if self._prefilling is not None:
            self._guarded(self._prefilling, self._prefill_more)

    def _begin(self, job: Job) -> None:
        began_s, since_s = time.thread_time(), time.perf_counter()
        try:
            prompt = self._caches.open(job.generation.salt, job.generation.ids)
            sequence = Sequence(job.generation, prompt, self._model, self._tokenizer, self._eos)
            self._tally.spent(prefill_s=time.thread_time() - began_s)
        except Exception as error:
            self._end(job, Step("", 0, 0, error=f"{type(error).__name__}: {error}"), "error")
            return
        self._tally.looked_up(len(job.generation.ids), prompt.cached_tokens)
        self._prefilling = _Running(job, sequence, since_s)

    def _prefill_more(self, one: _Running) -> None:
        began_s = time.thread_time()
        step = one.sequence.prefill(PREFILL_TOKENS)
        self._tally.spent(prefill_s=time.thread_time() - began_s)
        if step is None:
            return
        self._prefilling = None
        self._running.append(one)
        # The answer's first token goes out before its prompt is put away.
        now_s = time.perf_counter()
        one.prefill_s = now_s - one.began_s
        self._tally.first_token(now_s - one.job.came_s)
        self._say(one, step)
        if not step.last:
            self._caches.keep(one.sequence.prompt)

    def _decode(self, one: _Running) -> None:
        began_s = time.thread_time()
        step = one.sequence.decode()
        self._tally.spent(decode_s=time.thread_time() - began_s)
        self._say(one, step)

    def _say(self, one: _Running, step: Step) -> None:
        self._tally.generated()
        if not step.last:
            one.job.tell(step)
            return
        self._running.remove(one)
        self._caches.keep(one.sequence.prompt)  # with the answer: the next turn of a chat begins with it
        self._tell_prefill(one)
        self._end(one.job, step, step.finish or "error")

    def _tell_prefill(self, one: _Running) -> None:
        if one.prefill_s is not None:
            self._tally.prefilled(len(one.job.generation.ids), one.sequence.prompt.cached_tokens, one.prefill_s)

    def _abandon(self, one: _Running) -> None:
        self._forget(one)
        self._tally.ended("abort")
        self._tell_prefill(one)
        self._caches.keep(one.sequence.prompt)  # it is computed: whoever asks again need not wait for it

    def _guarded(self, one: _Running, act: Callable[[_Running], None]) -> None:
        """Whatever goes wrong with one request ends that one, and not the engine."""
        try:
            act(one)
        except Exception as error:
            self._forget(one)
            self._end(one.job, Step("", 0, 0, error=f"{type(error).__name__}: {error}"), "error")

    def _forget(self, one: _Running) -> None:
        if self._prefilling is one:
            self._prefilling = None
        elif one in self._running:
            self._running.remove(one)

    def _end(self, job: Job, step: Step, how: str) -> None:
        self._tally.ended(how)
        job.tell(step)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: by the model's own word, or else by its tokenizer's."""
    named = getattr(model.generation_config, "eos_token_id", None)
    if named is None:
        named = getattr(tokenizer, "eos_token_id", None)
    return frozenset([named] if isinstance(named, int) else named or ())


# One prompt on its way through the model: computed piece by piece, then continued token by token.


_LEAST_LOGPROB = -9999.0
"""In place of less: JSON has no infinity."""


class Sequence:
    """For the engine's thread alone. ``prefill`` until it gives a step, then ``decode`` until a step is the last."""

    def __init__(
        self,
        generation: Generation,
        prompt: OpenPrompt,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos: frozenset[int],
    ) -> None:
        self.prompt = prompt
        self._generation = generation
        self._model = model
        self._options: dict[str, Any] = forward_options(model)
        self._tokenizer = tokenizer
        self._ends = generation.stop_ids | (frozenset() if generation.ignore_eos else eos)
        self._chooser = Chooser(generation, self._ends)
        self._text = TextStream(
            tokenizer, generation.stops, keep_stop=generation.keep_stop, skip_special=generation.skip_special
        )
        self._fed = prompt.cached_tokens
        """Tokens of the prompt that are in the cache."""
        self._newest = 0
        self.generated = 0

    @property
    def tokens(self) -> int:
        """Tokens in its cache."""
        return self._fed + max(0, self.generated - 1)

    def prefill(self, at_most: int) -> Step | None:
        """Compute up to ``at_most`` more tokens of the prompt; the first step once that was the last of them."""
        ids = self._generation.ids[self._fed : self._fed + at_most]
        logits = self._forward(torch.from_numpy(ids)[None])
        self._fed += len(ids)
        return self._next(logits) if self._fed == len(self._generation.ids) else None

    def decode(self) -> Step:
        """One more token."""
        return self._next(self._forward(torch.tensor([[self._newest]])))

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits behind the last of ``ids``: (vocabulary,)."""
        with torch.inference_mode():
            out = self._model(
                input_ids=ids.to(self._model.device), past_key_values=self.prompt.cache, use_cache=True, **self._options
            )
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _next(self, logits: torch.Tensor) -> Step:
        self._newest = token = self._chooser.choose(logits)
        self.generated += 1
        logprob = None if self._generation.logprobs is None else self._logprob(logits, self._generation.logprobs)
        if token in self._ends:
            text = self._text.add(token) if self._generation.keep_stop else ""
            return self._step(text + self._text.finish(), "stop", logprob)
        text = self._text.add(token, may_stop=self.generated > self._generation.min_tokens)
        if self._text.stopped:
            return self._step(text, "stop", logprob)
        if self.generated == self._generation.max_tokens:
            text += self._text.finish()
            return self._step(text, "stop" if self._text.stopped else "length", logprob)
        return self._step(text, None, logprob)

    def _logprob(self, logits: torch.Tensor, likeliest: int) -> TokenLogprob:
        """Of the newest token, and so many of the ``likeliest`` in its place."""
        logprobs = logits.float().cpu().log_softmax(-1)
        best = logprobs.topk(min(likeliest, len(logprobs)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprob(
            self._word(self._newest),
            max(_LEAST_LOGPROB, float(logprobs[self._newest])),
            tuple((self._word(token), max(_LEAST_LOGPROB, logprob)) for token, logprob in pairs),
        )

    def _word(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _step(self, text: str, finish: str | None, logprob: TokenLogprob | None) -> Step:
        return Step(text, self.generated, self.prompt.cached_tokens, finish, logprob=logprob)
