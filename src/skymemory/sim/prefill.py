"""How long a GPU that we do not have takes for a prefill step, from what the Cake paper says of its two.

A step over tokens ``a .. b`` of a prompt takes ``batch_s + token_s · (b − a) + pair_s · (b² − a²)``: weights, then
attention to all that stands before. So the time of a chunk grows linearly with its index (the paper's figure 3) and
that of a prompt with its square (its finding 2).

The paper prints no times, only what Cake saves; they determine the model. Cake's time T over a link of known rate is
known from what it saves against loading alone, so are the tokens x that were not loaded in T, hence T(x); what it saves
against computing alone then gives T(all). Two equations, two coefficients, for each GPU. A part of the GPU needs its
own: other requests fill the batch up to its 512 tokens, so a step costs the same whatever is ours of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput

PAPER_TOKEN_BYTES = 2**19
"""KV of one token of LongAlpaca-7B in 16 bit: 2 · 32 layers · 4096 · 2 bytes, "0.5MB" in the paper's section 5.1."""
PAPER_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds of prefill steps: per step, per token of ours in it, and per pair of a token and one before it (halved).

    ``step_s`` has the form that the simulated loader wants.
    """

    name: str
    token_s: float
    pair_s: float
    batch_s: float = 0.0

    def step_s(self, first_token: int, tokens: int) -> float:
        """Seconds of one step over ``tokens`` tokens from ``first_token`` on."""
        return self.batch_s + self.token_s * tokens + self.pair_s * tokens * (2 * first_token + tokens)

    def prompt_s(self, tokens: int, budget_tokens: int = PAPER_STEP_TOKENS) -> float:
        """Seconds of a whole prompt in steps of ``budget_tokens``: computing alone."""
        return -(-tokens // budget_tokens) * self.batch_s + self.token_s * tokens + self.pair_s * tokens * tokens

    def for_larger_model(self, name: str, weights_ratio: float, attention_ratio: float) -> PrefillModel:
        """The same GPU with a model of so many times the weights, and layers × width."""
        return replace(
            self,
            name=name,
            token_s=self.token_s * weights_ratio,
            batch_s=self.batch_s * weights_ratio,
            pair_s=self.pair_s * attention_ratio,
        )


def fit_whole_gpu(name: str, saved_of_compute: float, saved_of_load: float) -> PrefillModel:
    """The model under which Cake saves these parts of computing and of loading alone: 32k tokens at 10000 Mbit/s.

    Section 5.2 of the paper: 31.5 % and 76.9 % on the A100, 26.7 % and 80.2 % on the H100.
    Raises InvalidInput for parts that no growing line fits.
    """
    tokens, tokens_per_s = 32_768, 10e9 / 8 / PAPER_TOKEN_BYTES
    cake_s = (1 - saved_of_load) * tokens / tokens_per_s
    computed = tokens - cake_s * tokens_per_s
    alone_s = cake_s / (1 - saved_of_compute)
    pair_s = (alone_s / tokens - cake_s / computed) / (tokens - computed)
    token_s = alone_s / tokens - pair_s * tokens
    if pair_s < 0 or token_s < 0:
        raise InvalidInput(f"{name}: no step that grows along the prompt saves {saved_of_compute:.1%} of computing")
    return PrefillModel(name, token_s, pair_s)


def fit_shared_gpu(name: str, ratio: float, added_s: float) -> PrefillModel:
    """The model under which 14k tokens with 10 % of each batch take ``ratio`` times, and ``added_s`` more than, 90 %.

    Section 5.3 of the paper: 8.22 times and 14.34 s on the A100.
    """
    tokens = 14_336
    few, many = (math.ceil(tokens / share_tokens(share)) for share in (0.9, 0.1))
    batch_s = added_s / (many - few)
    pair_s = (added_s / (ratio - 1) - few * batch_s) / tokens**2
    if pair_s < 0:
        raise InvalidInput(f"{name}: steps of equal length alone take more than {ratio:g} times as long")
    return PrefillModel(name, 0.0, pair_s, batch_s)


def share_tokens(share: float) -> int:
    """Tokens of a 512-token batch that a request with this share of the GPU gets."""
    return max(1, int(PAPER_STEP_TOKENS * share + 1e-9))


A100 = fit_whole_gpu("A100", 0.315, 0.769)
H100 = fit_whole_gpu("H100", 0.267, 0.802)
A100_SHARED = fit_shared_gpu("A100, shared", 8.22, 14.34)
H100_SHARED = replace(A100_SHARED, name="H100, shared", batch_s=A100_SHARED.batch_s * H100.token_s / A100.token_s)
"""Not of the paper, which shares the A100 only: its batch, faster by as much as the whole GPU is."""
_SHARED = {A100: A100_SHARED, H100: H100_SHARED}


def with_share(gpu: PrefillModel, share: float) -> PrefillModel:
    """``gpu``, one of the paper's two, alone (share 1) or with others in its batches."""
    return gpu if share >= 1 else _SHARED[gpu]
