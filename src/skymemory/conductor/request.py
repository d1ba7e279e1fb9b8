"""What a router knows of a request before it is served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

HEAD_BYTES = 1024
"""Of a prompt's text, what is kept for strategies that hash its beginning."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as blocks that caches could share.

    ``blocks``: one uint64 per whole block, each hash chained to the one before it and seeded by model, adapter and
    salt, so that equal hashes mean equal prefixes that may be shared. ``pieces``: the same blocks hashed each for
    itself, for strategies that compare prompts as sets. A rest that fills no block is in neither.
    """

    blocks: NDArray[np.uint64]
    pieces: NDArray[np.uint64]
    block_tokens: float
    """Tokens of one block: whole where a tokenizer is known, estimated where blocks are characters."""
    tokens: int
    """Tokens of the whole prompt, estimated where blocks are characters."""
    head: bytes = b""
    """The first ``HEAD_BYTES`` of its text, or of its token numbers."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to be routed. Empty words mean: there is none."""

    prompt: Prompt
    model: str = ""
    adapter: str = ""
    """LoRA adapter that the request names; its blocks are seeded with it."""
    salt: str = ""
    session: str = ""
    """What ties requests of one client together: a cookie, a header, or the client's address."""
    output_tokens: int | None = None
    """Asked for at most; None where the request does not say."""
    tenant: str = ""
    """Who pays, where that is known: fairness under overload is among tenants."""
    priority: int = 0
    """Higher is served first and refused last."""
    streams: bool = True
    """Whether the answer comes token by token. Else its first byte is its last, and does not show the prefill's end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a server comes by a prompt's KV. Tokens from the prompt's beginning, in this order::

        | held_tokens | computed while the next are loaded | loaded_tokens | computed after |
        0             held                                 split           split + loaded   tokens

    Without a Cake split ``split_tokens`` equals ``held_tokens``; with nothing loaded, both loads are 0.
    """

    held_tokens: int
    """There already."""
    split_tokens: int
    """Where what is loaded begins."""
    loaded_tokens: int
    source: str = ""
    """The server or the tier that it is loaded from; empty: nothing is loaded."""
    queue_s: float = 0.0
    """Estimated: until the server can begin."""
    load_s: float = 0.0
    """Estimated: until what is loaded has come, from now. It goes on while the request waits."""
    compute_s: float = 0.0
    """Estimated: computing all that is neither held nor loaded."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.held_tokens + self.loaded_tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """Which server, and why."""

    request: Request = field(repr=False)
    server: str
    fallbacks: tuple[str, ...]
    """The other servers that could serve it, best first."""
    strategy: str
    score: float
    matched_tokens: int
    """Tokens of the prompt that the chosen server is believed to hold."""
    reasons: tuple[str, ...]
    """Short sentences with figures, in the order in which they weighed."""
    at_s: float
    estimated_ttft_s: float | None = None
    estimated_tbt_s: float | None = None
    """Of a server that decodes: seconds between tokens, with this request in its batch."""
    plan: Plan | None = None
    """How the server comes by the prompt's KV; None: the strategy does not plan that."""
    estimated_compute_s: float | None = None
    """Of ``estimated_ttft_s``, what the server computes for this request alone."""

    def as_json(self) -> dict[str, object]:
        """What is told to whoever asks for a decision's reasons; no part of the prompt is in it."""
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
