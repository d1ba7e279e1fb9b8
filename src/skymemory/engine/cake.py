"""A transformers model as the computing side of Cake: chunked prefill in place, one step at a time.

The cache's room is allocated before anything is asked for. Steps are written behind one another into its front by the
model, chunks into its back by the fetching threads, and nothing is moved or concatenated afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from skymemory.cache.cake.cake import Cake, Sides
from skymemory.cache.cake.scheduler import ComputeStep
from skymemory.cache.cake.session import LoadingSession
from skymemory.cache.results import LoadResult
from skymemory.engine.kv_cache import SkyCache, Tokens
from skymemory.engine.prompts import at_positions

_NOTHING_TO_DO_S = 0.005


class Beside(Protocol):
    """The engine's other requests, which share its steps with the prompt that is being loaded."""

    def ours(self, step_tokens: int) -> int:
        """Of the next step's tokens, those that the loaded prompt gets; 0 pauses its computing."""

    def run(self, tokens: int, until: Callable[[], bool]) -> int:
        """Compute up to ``tokens`` tokens of the others, in this thread; how many it were.

        Between two of its forward passes it asks ``until`` and ends where that is true: the prompt is there.
        """


class CakePrefill:
    """Fills caches of ``model`` from both ends."""

    def __init__(self, model: PreTrainedModel, cake: Cake, options: dict[str, Any]) -> None:
        self.cake = cake
        self.beside: Beside | None = None
        self.on_chunks: Callable[[int], object] | None = None
        """Told the number of chunks of each prompt, before the first of them is settled."""
        self.on_settled: Callable[[int, str], object] | None = None
        self.scheduling_s = 0.0
        """What scheduling took of the last prompt, all threads together."""
        self._model = model
        self._options = options

    def load(
        self, cache: SkyCache, ids: Tokens, limit_tokens: int, seconds: dict[str, float], sides: Sides
    ) -> LoadResult:
        """Fill ``cache`` with the prompt up to the last block that the store has (``limit_tokens`` at most)."""
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
            others = step_tokens - (step.tokens if step is not None else 0)
            ran = self.beside.run(others, lambda: session.done) if others else 0
            if step is not None:
                session.step_done()
            elif not ran and (step := session.next_step(timeout_s=_NOTHING_TO_DO_S)) is not None:
                self._compute(step, cache, ids, prompt)
                session.step_done()
            if (now := min(self.beside.ours(step_tokens), step_tokens)) != budget:
                budget = now
                session.set_budget(budget)

    def _compute(self, step: ComputeStep, cache: SkyCache, ids: Tokens, prompt: torch.Tensor) -> None:
        """Prefill the tokens of ``step`` behind those before it, which are all in their place."""
        if cache.get_seq_length() != step.first_token:
            cache.fill(ids[: step.first_token])
        with torch.inference_mode():
            self._model(
                input_ids=prompt[:, step.first_token : step.first_token + step.tokens],
                past_key_values=cache,
                use_cache=True,
                **self._options,
                **at_positions(self._model, step.first_token, step.tokens),
            )
        if prompt.is_cuda:
            torch.cuda.current_stream().synchronize()  # the step is timed, and its end is told
