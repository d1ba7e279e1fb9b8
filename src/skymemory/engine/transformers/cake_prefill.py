"""Cake for a transformers model: steps are computed at the front of a preallocated cache, chunks loaded into
its back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from skymemory.cache.blocks import LoadResult
from skymemory.cache.cake.cake import Cake, Sides
from skymemory.cache.cake.scheduler import ComputeStep
from skymemory.cache.cake.session import LoadingSession
from skymemory.engine.transformers.forward import at_positions, cache_option, forward_options
from skymemory.engine.transformers.kv_cache import SkyCache, Tokens
from skymemory.engine.transformers.prompts import TokenIds, flat_ids
from skymemory.errors import InvalidInput

_NOTHING_TO_DO_S = 0.005


class Beside(Protocol):
    """Other requests of the engine, which share its steps with the prompt being loaded."""

    def ours(self, step_tokens: int) -> int:
        """Return the loaded prompt's tokens of the next step; 0 pauses its computing."""

    def run(self, tokens: int, until: Callable[[], bool]) -> int:
        """Compute up to ``tokens`` tokens of the other requests in this thread; returns their number. Stops between two
        forward passes when ``until`` returns True.
        """


class CakePrefill:
    """Prefill of a prompt by Cake: its front is computed while its back is loaded."""

    def __init__(self, model: PreTrainedModel, cake: Cake, options: dict[str, Any]) -> None:
        self.cake = cake
        self.beside: Beside | None = None
        self.on_chunks: Callable[[int], object] | None = None
        self.on_settled: Callable[[int, str], object] | None = None
        self.scheduling_s = 0.0
        self._model = model
        self._options = options

    def load(
        self, cache: SkyCache, ids: Tokens, limit_tokens: int, seconds: dict[str, float], sides: Sides
    ) -> LoadResult:
        """Fill ``cache`` with the prompt up to its last stored block, at most ``limit_tokens``."""
        step_tokens = self.cake.settings.step_tokens
        budget = min(self.beside.ours(step_tokens), step_tokens) if self.beside is not None else step_tokens
        load = self.cake.open(
            ids,
            cache.groups,
            limit_tokens=limit_tokens,
            budget_tokens=budget,
            sides=sides,
            seconds=seconds,
            on_chunks=self.on_chunks,
            on_settled=self.on_settled,
        )
        try:
            if load.session is not None:
                with load.phase("cake"):
                    self._run(load.session, cache, ids, budget)
        finally:
            result = load.finish()
        if load.session is not None:
            self.scheduling_s = load.session.scheduling_s
        cache.fill(ids[: min(load.reach_tokens, limit_tokens)])
        return result

    def close(self) -> None:
        self.cake.close()

    def _run(self, session: LoadingSession, cache: SkyCache, ids: Tokens, budget: int) -> None:
        # Compute steps, each shared with ``beside`` if set, until they meet the loaded chunks.
        prompt = torch.from_numpy(ids).to(self._model.device)[None]
        if self.beside is None:
            while (step := session.next_step()) is not None:
                self._compute(step, cache, ids, prompt)
                session.step_done()
            return
        step_tokens = self.cake.settings.step_tokens
        while not session.done:
            step = session.next_step(timeout_s=0)
            if step is not None:
                self._compute(step, cache, ids, prompt)
            other_tokens = step_tokens - (step.tokens if step is not None else 0)
            ran = self.beside.run(other_tokens, lambda: session.done) if other_tokens else 0
            if step is not None:
                session.step_done()
            elif not ran and (step := session.next_step(timeout_s=_NOTHING_TO_DO_S)) is not None:
                self._compute(step, cache, ids, prompt)
                session.step_done()
            if (now := min(self.beside.ours(step_tokens), step_tokens)) != budget:
                budget = now
                session.set_budget(budget)

    def _compute(self, step: ComputeStep, cache: SkyCache, ids: Tokens, prompt: torch.Tensor) -> None:
        # Chunks loaded in front of this step become contents.
        if cache.get_seq_length() != step.first_token:
            cache.fill(ids[: step.first_token])
        with torch.inference_mode():
            self._model(
                input_ids=prompt[:, step.first_token : step.first_token + step.tokens],
                use_cache=True,
                **cache_option(self._model, cache),
                **self._options,
                **at_positions(self._model, step.first_token, step.tokens),
            )
        if prompt.is_cuda:
            torch.cuda.current_stream().synchronize()  # the step's end is measured


class OtherPrompts:
    """``Beside`` that computes ``prompts`` in sequence with ``1 - share`` of every step; ``share`` may be changed.

    At most ``piece_tokens`` per forward pass; with ``again`` the prompts repeat.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Iterable[TokenIds],
        share: float,
        *,
        piece_tokens: int = 128,
        again: bool = False,
    ) -> None:
        self._model = model
        self._options = forward_options(model)
        self._waiting = deque((at, torch.from_numpy(flat_ids(ids))[None]) for at, ids in enumerate(prompts))
        if any(not ids.shape[1] for _, ids in self._waiting):
            raise InvalidInput("a prompt with no tokens cannot be computed")
        if not 0 <= share <= 1 or piece_tokens < 1:
            raise InvalidInput(f"share must be 0 to 1 and piece_tokens at least 1, got {share} and {piece_tokens}")
        self.share = share
        self._piece_tokens = piece_tokens
        self._again = again
        self._cache: DynamicCache | None = None
        self.computed_tokens = 0
        self.finished: dict[int, DynamicCache] = {}
        """Caches by number of the prompt; empty with ``again``."""

    def ours(self, step_tokens: int) -> int:
        return round(step_tokens * self.share) if self._waiting else step_tokens

    def run(self, tokens: int, until: Callable[[], bool]) -> int:
        """Compute up to ``tokens`` tokens of the waiting prompts, as ``Beside.run``."""
        ran = 0
        while ran < tokens and self._waiting and not until():
            number, ids = self._waiting[0]
            if self._cache is None:
                self._cache = DynamicCache()
            start = self._cache.get_seq_length()
            piece = ids[:, start : start + min(tokens - ran, self._piece_tokens)]
            with torch.inference_mode():
                options = {**self._options, **at_positions(self._model, start, piece.shape[1])}
                options |= {"use_cache": True, **cache_option(self._model, self._cache)}
                self._model(input_ids=piece.to(self._model.device), **options)
            ran += piece.shape[1]
            if start + piece.shape[1] == ids.shape[1]:
                self._waiting.popleft()
                if self._again:
                    self._waiting.append((number, ids))
                else:
                    self.finished[number] = self._cache
                self._cache = None
        self.computed_tokens += ran
        return ran
