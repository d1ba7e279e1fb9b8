"""Requests as routers see them, and routing decisions."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skymemory.errors import InvalidInput

HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives: seconds to the first token, and between tokens."""

    ttft_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tbt_s > 0):
            raise InvalidInput(f"objectives of {self.ttft_s:g} s and {self.tbt_s:g} s per token; expected above 0")


@dataclass(slots=True)
class Prompt:
    """Prompt as hashes of its blocks. Immutable by convention: a frozen dataclass is three times as slow to create."""

    blocks: NDArray[np.uint64]
    """Hash per full block, chained to the previous block and seeded by model, adapter and salt."""
    pieces: NDArray[np.uint64]
    """Hash per full block, of this block alone."""
    block_tokens: float
    """Tokens per block; estimated if blocks are characters."""
    tokens: int
    head: bytes = b""
    """First ``HEAD_BYTES`` of its text or token ids."""


@dataclass(slots=True)
class Request:
    """Request to route; empty strings mean none."""

    prompt: Prompt
    model: str = ""
    adapter: str = ""
    """LoRA adapter."""
    salt: str = ""
    """Word that separates the caches of tenants."""
    session: str = ""
    """Client's cookie, header or address."""
    output_tokens: int | None = None
    tenant: str = ""
    priority: int = 0
    """Higher values are served first and refused last."""
    streams: bool = True
    """False: the whole answer comes at once, so its first byte does not mark the end of the prefill."""
    slo: Slo | None = None
    answers: int = 1
    """Number of completions to generate, over all its prompts."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Plan for obtaining a prompt's KV, in tokens from the prompt's beginning::

        | held_tokens | computed while the next are loaded | loaded_tokens | computed after |
        0             held                                 split           split + loaded   tokens

    Without a Cake split ``split_tokens`` equals ``held_tokens``.
    """

    held_tokens: int
    split_tokens: int
    loaded_tokens: int
    source: str = ""
    queue_s: float = 0.0
    load_s: float = 0.0
    """Estimated time until the load is complete, beginning now."""
    compute_s: float = 0.0

    @property
    def cached_tokens(self) -> int:
        return self.held_tokens + self.loaded_tokens


Names = tuple[str, ...]
Explanation = tuple[Names, Names]


@dataclass(slots=True, eq=False, repr=False)
class Decision:
    """Server chosen for a request. Immutable by convention."""

    request: Request
    server: str
    _explanation: Explanation | Callable[[], Explanation]
    strategy: str
    score: float
    matched_tokens: int
    at_s: float
    estimated_ttft_s: float | None = None
    estimated_tbt_s: float | None = None
    """Seconds between tokens, this request included."""
    plan: PromptPlan | None = None
    estimated_compute_s: float | None = None

    @property
    def fallbacks(self) -> Names:
        return self._explained()[0]

    @property
    def reasons(self) -> Names:
        """Sentences with figures, the most important first."""
        return self._explained()[1]

    def _explained(self) -> Explanation:
        # A function until the first use, as few callers read it.
        explanation = self._explanation
        if not isinstance(explanation, tuple):
            explanation = self._explanation = explanation()
        return explanation

    def __repr__(self) -> str:
        return (
            f"Decision({self.server!r} by {self.strategy}, score {self.score:g}, {self.matched_tokens} tokens matched)"
        )

    def taken_by(self, server: str) -> Decision:
        """Return the decision for ``server``, which took the request instead of the chosen server."""
        decision = copy(self)
        decision.server, decision.matched_tokens, decision.estimated_ttft_s = server, 0, None
        decision._explanation = (
            tuple(name for name in self.fallbacks if name != server),
            (*self.reasons, f"{self.server} did not take it; {server} did"),
        )
        return decision

    @property
    def kind(self) -> str:
        """Label for metrics: "matched" or "unmatched", prefixed "adapter-" if it narrowed the choice."""
        kind = "matched" if self.matched_tokens > 0 else "unmatched"
        narrowed = self.request.adapter and self.reasons and self.reasons[0].startswith("adapter ")
        return "adapter-" + kind if narrowed else kind

    def as_json(self) -> dict[str, object]:
        """Return the decision without any part of the prompt."""
        return {
            "server": self.server,
            "fallbacks": list(self.fallbacks),
            "strategy": self.strategy,
            "score": round(self.score, 6),
            "prompt_tokens": self.request.prompt.tokens,
            "matched_tokens": self.matched_tokens,
            "estimated_ttft_s": _rounded(self.estimated_ttft_s),
            "estimated_compute_s": _rounded(self.estimated_compute_s),
            "reasons": list(self.reasons),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


_TAG = b"skymemory prefix seed, version 1"
_LENGTH = struct.Struct("<I")


def seed(model: str, adapter: str, salt: str) -> int:
    """Return the seed of a prompt's chain of block hashes: models, adapters and salts share no blocks.

    It is the first eight bytes, little-endian, of the SHA-256 of a tag and each word as UTF-8 after its length (four
    bytes).
    """
    # Lengths precede the words, so that ("ab", "c") and ("a", "bc") differ. Lone surrogates are encoded as they are.
    message = bytearray(_TAG)
    for word in (model, adapter, salt):
        raw = word.encode("utf-8", "surrogatepass")
        message += _LENGTH.pack(len(raw)) + raw
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")
