"""Requests as routers see them, and the decisions made for them."""

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
"""Length of ``Prompt.head``."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives: time to first token, time between tokens."""

    ttft_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tbt_s > 0):
            raise InvalidInput(f"objectives of {self.ttft_s:g} s and {self.tbt_s:g} s per token; expected above 0")


@dataclass(slots=True)
class Prompt:
    """A prompt as hashes of its blocks. Immutable by convention, as is a request: a frozen one takes three times as
    long to make.

    ``blocks``: one uint64 per full block, each chained to the one before it and seeded by model, adapter and salt, so
    that equal hashes mean equal prefixes that may be shared. ``pieces``: the same blocks hashed independently, for
    strategies that compare prompts as sets. A last, partial block is in neither.
    """

    blocks: NDArray[np.uint64]
    pieces: NDArray[np.uint64]
    block_tokens: float
    """Tokens per block; estimated where blocks are characters."""
    tokens: int
    """Tokens of the prompt; estimated where blocks are characters."""
    head: bytes = b""
    """The first ``HEAD_BYTES`` of its text or token ids, for strategies that hash the beginning."""


@dataclass(slots=True)
class Request:
    """One request to route. Empty strings mean none."""

    prompt: Prompt
    model: str = ""
    adapter: str = ""
    """LoRA adapter; the block hashes are seeded with it."""
    salt: str = ""
    session: str = ""
    """Identifies a client's requests: a cookie, a header or an address."""
    output_tokens: int | None = None
    """The limit of one answer; None without one."""
    tenant: str = ""
    """Owner of the API key: fairness under overload is among tenants."""
    priority: int = 0
    """Higher is served first and refused last."""
    streams: bool = True
    """Whether the answer is streamed. If not, its first byte does not mark the end of the prefill."""
    slo: Slo | None = None
    """Objectives of this request; None: the general ones."""
    answers: int = 1
    """How many are generated: of several prompts, or several of one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a server obtains a prompt's KV. Tokens from the prompt's beginning, in this order::

        | held_tokens | computed while the next are loaded | loaded_tokens | computed after |
        0             held                                 split           split + loaded   tokens

    Without a Cake split ``split_tokens`` equals ``held_tokens``; with nothing loaded, both loads are 0.
    """

    held_tokens: int
    """Cached on the server."""
    split_tokens: int
    """Where the loaded part begins."""
    loaded_tokens: int
    source: str = ""
    """Server or tier that the loaded part comes from; empty: nothing is loaded."""
    queue_s: float = 0.0
    """Estimated wait until the server starts computing."""
    load_s: float = 0.0
    """Estimated time from now until the load is complete. It proceeds while the request waits."""
    compute_s: float = 0.0
    """Estimated time to compute what is neither held nor loaded."""

    @property
    def cached_tokens(self) -> int:
        """Tokens that are not computed."""
        return self.held_tokens + self.loaded_tokens


Names = tuple[str, ...]
Explanation = tuple[Names, Names]
"""Fallbacks and reasons of a decision."""


@dataclass(slots=True, eq=False, repr=False)
class Decision:
    """The server chosen for a request, with reasons and estimates. Immutable by convention.

    The explanation may be given as a function, which is called on first use: few callers read it.
    """

    request: Request
    server: str
    _explanation: Explanation | Callable[[], Explanation]
    strategy: str
    score: float
    matched_tokens: int
    """Tokens of the prompt that the server is estimated to hold."""
    at_s: float
    estimated_ttft_s: float | None = None
    estimated_tbt_s: float | None = None
    """For decode servers: seconds between tokens with this request in the batch."""
    plan: Plan | None = None
    """How the server obtains the prompt's KV; None: the strategy does not plan it."""
    estimated_compute_s: float | None = None
    """The part of ``estimated_ttft_s`` that computes this request."""

    @property
    def fallbacks(self) -> Names:
        """The other servers that could serve it, best first."""
        return self._explained()[0]

    @property
    def reasons(self) -> Names:
        """Short sentences with figures, the most important first."""
        return self._explained()[1]

    def _explained(self) -> Explanation:
        explanation = self._explanation
        if not isinstance(explanation, tuple):
            explanation = self._explanation = explanation()
        return explanation

    def __repr__(self) -> str:
        return (
            f"Decision({self.server!r} by {self.strategy}, score {self.score:g}, {self.matched_tokens} tokens matched)"
        )

    def taken_by(self, server: str) -> Decision:
        """The decision after another server than the chosen one took the request; its matched tokens are unknown."""
        taken = copy(self)
        taken.server, taken.matched_tokens, taken.estimated_ttft_s = server, 0, None
        taken._explanation = (
            tuple(name for name in self.fallbacks if name != server),
            (*self.reasons, f"{self.server} did not take it; {server} did"),
        )
        return taken

    @property
    def kind(self) -> str:
        """ "matched" or "unmatched", with the prefix "adapter-" if the adapter narrowed the choice (a label)."""
        kind = "matched" if self.matched_tokens > 0 else "unmatched"
        narrowed = self.request.adapter and self.reasons and self.reasons[0].startswith("adapter ")
        return "adapter-" + kind if narrowed else kind

    def as_json(self) -> dict[str, object]:
        """The decision for clients and logs; contains no part of the prompt."""
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
    """Seed of a prompt's chain of block hashes (``native.chain_hashes``): prompts share a cache only if it is equal.

    The first eight bytes, little-endian, of the SHA-256 of a tag and each word as UTF-8 after its length (four bytes).
    Lone surrogates, which JSON may contain, are encoded as they are.
    """
    # Lengths before the words, so that ("ab", "c") and ("a", "bc") differ.
    message = bytearray(_TAG)
    for word in (model, adapter, salt):
        raw = word.encode("utf-8", "surrogatepass")
        message += _LENGTH.pack(len(raw)) + raw
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")
