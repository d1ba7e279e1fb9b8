"""The next token out of a model's logits: the likeliest, or drawn."""

from __future__ import annotations

import torch

from skymemory.serving.generation import Sampling

_LEAST_TEMPERATURE = 1e-5
"""Below it the likeliest is taken: dividing by less overflows, and would draw nothing else."""


class Chooser:
    """Chooses the tokens of one answer. The same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._dice = torch.Generator()
        if sampling.seed is None:
            self._dice.seed()
        else:
            self._dice.manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """``logits``: (vocabulary,)."""
        if self._sampling.temperature < _LEAST_TEMPERATURE:
            return int(logits.argmax())
        chances = (logits.float().cpu() / self._sampling.temperature).softmax(-1)
        if self._sampling.top_p < 1:
            likeliest, tokens = chances.sort(descending=True)
            # The token that reaches top_p is the last that stays.
            likeliest[likeliest.cumsum(-1) - likeliest >= self._sampling.top_p] = 0
            return int(tokens[torch.multinomial(likeliest, 1, generator=self._dice)])
        return int(torch.multinomial(chances, 1, generator=self._dice))
