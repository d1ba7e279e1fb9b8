"""The engine's thread: continuous batching with chunked prefill of one prompt at a time, first come, first served."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.transformers.forward import cache_option, forward_options
from skymemory.engine.transformers.models import ReadyModel
from skymemory.errors import SkyMemoryError
from skymemory_lab.engine.caches import OpenPrompt, PrefixCaches
from skymemory_lab.engine.generation import Generation, Sampler, Step, TextStream, TokenLogprob
from skymemory_lab.engine.handover import BlockSaver, Outgoing
from skymemory_lab.engine.metrics import PublishedMetrics

PREFILL_TOKENS = 256
"""Tokens of a prefill chunk."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class EngineJob:
    """Work of computing an answer (a choice of a request); ``on_step`` is called in the engine's thread."""

    generation: Generation
    on_step: Callable[[Step], object]
    cancelled: bool = False
    outgoing: Outgoing = field(default_factory=Outgoing)
    arrived_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True, eq=False)
class _Running:
    """Job in prefill or decoding."""

    job: EngineJob
    sequence: Sequence
    began_s: float
    prefill_s: float | None = None  # from ``began_s`` to the first token


class QueueFull(Exception):
    pass


class EngineStopping(SkyMemoryError):
    pass


class EngineThread:
    """Continuous batching of jobs in its own thread, until closed. Thread-safe."""

    def __init__(
        self,
        ready: ReadyModel,
        caches: PrefixCaches,
        metrics: PublishedMetrics,
        *,
        max_running: int,
        max_waiting: int,
        saver: BlockSaver | None = None,
    ) -> None:
        """Start the thread; the caller closes ``saver``."""
        self._saver = saver
        self._model, self._tokenizer = ready.model, ready.tokenizer
        self.block_tokens = caches.block_tokens
        self._caches = caches
        self._metrics = metrics
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._eos = _end_tokens(ready.model, ready.tokenizer)
        self._change = threading.Condition()
        self._waiting: deque[EngineJob] = deque()
        self._prefilling: _Running | None = None
        self._running: list[_Running] = []
        self._fetching = 0  # requests that wait for another engine's blocks
        self._calls: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting) + self._fetching

    @property
    def running(self) -> int:
        return len(self._running) + (self._prefilling is not None)

    @property
    def held_tokens(self) -> int:
        prefilling = self._prefilling
        busy = [*self._running, *([prefilling] if prefilling else [])]
        return sum(running.sequence.tokens for running in busy)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @contextmanager
    def place(self) -> Iterator[None]:
        """Reserve a place in the queue while the request's blocks are fetched.

        Raises:
            QueueFull: no place is left.
        """
        with self._change:
            self._check_room()
            self._fetching += 1
        try:
            yield
        finally:
            with self._change:
                self._fetching -= 1

    def submit(self, *jobs: EngineJob, has_place: bool = False) -> None:
        """Queue all jobs, or none.

        Raises:
            QueueFull: the queue is full and the jobs have no ``place``.
            EngineStopping: the engine is being closed.
        """
        with self._change:
            if not self.alive:  # no thread would answer them
                raise EngineStopping("the engine is stopping")
            # Choices of a request are queued together, so the queue may exceed its limit.
            if not has_place:
                self._check_room()
            self._waiting.extend(jobs)
            self._change.notify()

    def _check_room(self) -> None:
        if self.waiting >= self._max_waiting:
            raise QueueFull

    def cancel(self, *jobs: EngineJob) -> None:
        """End these jobs at the next turn."""
        for job in jobs:
            job.cancelled = True
        with self._change:
            self._change.notify()

    def clear_cache(self) -> Future[int]:
        return self.call(self._caches.clear)

    def call(self, act: Callable[[], T]) -> Future[T]:
        """Run ``act`` between two turns; its future has EngineStopping if no turn follows."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller that has disconnected does not cancel it

        def turn() -> None:
            try:
                if self._stopping:
                    raise EngineStopping("the engine is stopping")
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)

        with self._change:
            if self.alive:
                self._calls.append(turn)
                self._change.notify()
            else:
                future.set_exception(EngineStopping("the engine is stopping"))
        return future

    def close(self) -> None:
        """Stop after the current step; unfinished requests fail."""
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join()

    def _run(self) -> None:
        # A turn first frees memory, then computes one chunk of one prompt, then one token of every running request. So
        # a long prompt delays the tokens of others by one chunk at a time (chunked prefill: Sarathi-Serve, OSDI 2024).
        while self._wait():
            while self._calls:
                self._calls.popleft()()
            self._drop_cancelled()
            self._prefill()
            for running in list(self._running):
                self._guarded(running, self._decode)
        # The thread is stopping: every handler waits for a last step or for a call.
        while self._calls:
            self._calls.popleft()()
        for job in [*(running.job for running in self._busy()), *self._waiting]:
            self._end(job, Step("", 0, 0, error="the engine is stopping"), "abort")
        self._prefilling, self._running = None, []
        self._waiting.clear()

    def _busy(self) -> list[_Running]:
        return [*([self._prefilling] if self._prefilling else []), *self._running]

    def _wait(self) -> bool:
        with self._change:
            self._change.wait_for(
                lambda: self._stopping or self._calls or self._waiting or self._prefilling or self._running
            )
            return not self._stopping

    def _drop_cancelled(self) -> None:
        with self._change:
            cancelled = [job for job in self._waiting if job.cancelled]
            for job in cancelled:
                self._waiting.remove(job)
        for _ in cancelled:
            self._metrics.on_request_end("abort")
        for running in self._busy():
            if running.job.cancelled:
                self._guarded(running, self._abandon)

    def _prefill(self) -> None:
        # Compute a chunk of the current prompt, or of the next job's.
        if self._prefilling is None and len(self._running) < self._max_running:
            with self._change:
                job = self._waiting.popleft() if self._waiting else None
            if job is not None:
                self._begin(job)
        if self._prefilling is not None:
            self._guarded(self._prefilling, self._prefill_more)

    def _begin(self, job: EngineJob) -> None:
        # Look up the job's prompt in the prefix cache and make it the current prefill.
        # ``skymemory fit`` measures thread time, which other load does not change; wall time is what users see.
        thread_started_s, started_s = time.thread_time(), time.perf_counter()
        try:
            prompt = self._caches.open(job.generation.salt, job.generation.ids)
            sequence = Sequence(job.generation, prompt, self._model, self._tokenizer, self._eos)
            self._metrics.spent(prefill_s=time.thread_time() - thread_started_s)
        except Exception as error:
            self._end(job, Step("", 0, 0, error=f"{type(error).__name__}: {error}"), "error")
            return
        self._metrics.looked_up(len(job.generation.ids), prompt.cached_tokens)
        self._prefilling = _Running(job, sequence, started_s)

    def _prefill_more(self, running: _Running) -> None:
        # Compute a chunk of the prompt; after the last, report the first token and move the job to decoding.
        started_s = time.thread_time()
        step = running.sequence.prefill(PREFILL_TOKENS)
        self._metrics.spent(prefill_s=time.thread_time() - started_s)
        if step is None:
            if running.job.outgoing.eager:
                self._keep(running)
            return
        self._prefilling = None
        self._running.append(running)
        # The first token is sent before the prompt's blocks are stored.
        now_s = time.perf_counter()
        running.prefill_s = now_s - running.began_s
        self._metrics.first_token(now_s - running.job.arrived_s)
        self._emit(running, step)
        if not step.last:
            self._keep(running)

    def _keep(self, running: _Running) -> None:
        # Put the blocks computed so far into the prefix cache and queue them for the shared store.
        chains = self._caches.keep(running.sequence.prompt)
        if self._saver is not None and chains:
            self._saver.offer(chains, running.job.outgoing)

    def _decode(self, running: _Running) -> None:
        started_s = time.thread_time()
        step = running.sequence.decode()
        self._metrics.spent(decode_s=time.thread_time() - started_s)
        self._emit(running, step)

    def _emit(self, running: _Running, step: Step) -> None:
        # Report a step to the job; on the last step, cache its blocks and end it.
        self._metrics.generated()
        if not step.last:
            running.job.on_step(step)
            return
        self._running.remove(running)
        self._keep(running)  # including the answer: the next turn of a chat begins with it
        if self._saver is not None:
            self._saver.end(running.job.outgoing)
        self._count_prefill(running)
        self._end(running.job, step, step.finish or "error")

    def _count_prefill(self, running: _Running) -> None:
        if running.prefill_s is not None:
            self._metrics.prefilled(
                len(running.job.generation.ids), running.sequence.prompt.cached_tokens, running.prefill_s
            )

    def _abandon(self, running: _Running) -> None:
        # End a cancelled job, whose client has disconnected.
        self._forget(running)
        self._metrics.on_request_end("abort")
        self._count_prefill(running)
        self._keep(running)  # already computed: a repeated request will hit it

    def _guarded(self, running: _Running, act: Callable[[_Running], None]) -> None:
        try:
            act(running)
        except Exception as error:
            self._forget(running)
            self._end(running.job, Step("", 0, 0, error=f"{type(error).__name__}: {error}"), "error")

    def _forget(self, running: _Running) -> None:
        if self._prefilling is running:
            self._prefilling = None
        elif running in self._running:
            self._running.remove(running)

    def _end(self, job: EngineJob, step: Step, reason: str) -> None:
        self._metrics.on_request_end(reason)
        job.on_step(step)


def _end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or ())


_MIN_LOGPROB = -9999.0  # lowest log-probability: JSON has no infinity


class Sequence:
    """Answer in the model: call ``prefill`` until it returns a step, then ``decode`` until a step is the last.

    Used only in the engine's thread. ``eos``: tokens that end an answer.
    """

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
        self._sampler = Sampler(generation, self._ends)
        self._text = TextStream(
            tokenizer, generation.stops, keep_stop=generation.keep_stop, skip_special=generation.skip_special
        )
        self._prefilled = prompt.cached_tokens
        self._last_token = 0
        self.generated = 0

    @property
    def tokens(self) -> int:
        # The newest token enters the cache only with the next forward pass.
        return self._prefilled + max(0, self.generated - 1)

    def prefill(self, at_most: int) -> Step | None:
        """Compute up to ``at_most`` prompt tokens; after the prompt's last, return the first step."""
        ids = self._generation.ids[self._prefilled : self._prefilled + at_most]
        logits = self._forward(torch.from_numpy(ids)[None])
        self._prefilled += len(ids)
        return self._next(logits) if self._prefilled == len(self._generation.ids) else None

    def decode(self) -> Step:
        return self._next(self._forward(torch.tensor([[self._last_token]])))

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the last token's logits, shape (vocabulary,)."""
        with torch.inference_mode():
            cached = cache_option(self._model, self.prompt.cache)
            out = self._model(input_ids=ids.to(self._model.device), use_cache=True, **cached, **self._options)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def _next(self, logits: torch.Tensor) -> Step:
        # Sample the next token; return its step, the last at an end token, a stop string or the token limit.
        self._last_token = token = self._sampler.sample(logits)
        self.generated += 1
        logprob = None if self._generation.logprobs is None else self._logprob(logits, self._generation.logprobs)
        if token in self._ends:
            text = self._text.add(token) if self._generation.keep_stop else ""
            return self._step(text + self._text.finish(), "stop", logprob)
        text = self._text.add(token, may_stop=self.generated > self._generation.min_tokens)
        if self._text.stopped_by:
            return self._step(text, "stop", logprob)
        if self.generated == self._generation.max_tokens:
            text += self._text.finish()
            return self._step(text, "stop" if self._text.stopped_by else "length", logprob)
        return self._step(text, None, logprob)

    def _logprob(self, logits: torch.Tensor, likeliest: int) -> TokenLogprob:
        # From the model's own distribution, before penalties and temperature, as vLLM reports them by default.
        logprobs = logits.float().cpu().log_softmax(-1)
        best = logprobs.topk(min(likeliest, len(logprobs)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprob(
            self._token_text(self._last_token),
            max(_MIN_LOGPROB, float(logprobs[self._last_token])),
            tuple((self._token_text(token), max(_MIN_LOGPROB, logprob)) for token, logprob in pairs),
        )

    def _token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _step(self, text: str, finish: str | None, logprob: TokenLogprob | None) -> Step:
        stopped_by = "" if finish is None else self._text.stopped_by
        return Step(text, self.generated, self.prompt.cached_tokens, finish, stopped_by, logprob=logprob)
