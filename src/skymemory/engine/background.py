"""Other requests of the same engine: prompts that are prefilled in what Cake's steps leave over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from transformers import DynamicCache, PreTrainedModel

from skymemory.engine.prompts import TokenIds, at_positions, flat_ids, forward_options
from skymemory.errors import InvalidInput


class OtherPrompts:
    """``prompts``, computed one after the other with ``1 - share`` of every step: an ``engine.cake.Beside``.

    A step is ours and theirs in turn, in one thread, ``piece_tokens`` at most in one forward pass of theirs. ``again``:
    begin each anew when it is done, so that there is always work beside. ``share`` may be set at any time.
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
            raise InvalidInput("a prompt of no tokens cannot be computed")
        if not 0 <= share <= 1 or piece_tokens < 1:
            raise InvalidInput(f"a share must be 0 to 1 and a piece at least a token, got {share} and {piece_tokens}")
        self.share = share
        self._piece_tokens = piece_tokens
        self._again = again
        self._cache: DynamicCache | None = None
        self.computed_tokens = 0
        self.finished: dict[int, DynamicCache] = {}
        """The caches of the prompts that are done, by their number; kept only if they are not begun again."""

    def ours(self, step_tokens: int) -> int:
        return round(step_tokens * self.share) if self._waiting else step_tokens

    def run(self, tokens: int, until: Callable[[], bool]) -> int:
        ran = 0
        while ran < tokens and self._waiting and not until():
            number, ids = self._waiting[0]
            if self._cache is None:
                self._cache = DynamicCache()
            start = self._cache.get_seq_length()
            piece = ids[:, start : start + min(tokens - ran, self._piece_tokens)]
            with torch.inference_mode():
                options = {**self._options, **at_positions(self._model, start, piece.shape[1])}
                self._model(
                    input_ids=piece.to(self._model.device), past_key_values=self._cache, use_cache=True, **options
                )
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
