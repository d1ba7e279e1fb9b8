"""One prompt on its way through the model: computed piece by piece, then continued token by token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skymemory.engine.passes import forward_options
from skymemory.serving.choosing import Chooser
from skymemory.serving.generation import Generation, Step
from skymemory.serving.prefix_caches import OpenPrompt
from skymemory.serving.text_stream import TextStream


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
        self._eos = frozenset() if generation.ignore_eos else eos
        self._chooser = Chooser(generation.sampling)
        self._text = TextStream(tokenizer, generation.stops)
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
        self._newest = self._chooser.choose(logits)
        self.generated += 1
        if self._newest in self._eos:
            return self._step(self._text.finish(), "stop")
        text = self._text.add(self._newest)
        if self._text.stopped:
            return self._step(text, "stop")
        if self.generated == self._generation.max_tokens:
            text += self._text.finish()
            return self._step(text, "stop" if self._text.stopped else "length")
        return self._step(text, None)

    def _step(self, text: str, finish: str | None) -> Step:
        return Step(text, self.generated, self.prompt.cached_tokens, finish)
