"""What a router knows of a request before it is served."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skymemory.errors import InvalidInput

HEAD_BYTES = 1024
"""Of a prompt's text, what is kept for strategies that hash its beginning."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What was promised: seconds to the first token, and seconds from token to token."""

    ttft_s: float
    tbt_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tbt_s > 0):
            raise InvalidInput(f"promises of {self.ttft_s:g} s and {self.tbt_s:g} s per token cannot be kept; above 0")


@dataclass(slots=True)
class Prompt:
    """A prompt as blocks that caches could share. Nobody changes one (nor a request): one that is frozen takes three
    times as long to make.

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


@dataclass(slots=True)
class Request:
    """One request to be routed, as nobody changes it. Empty words mean: there is none."""

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
    slo: Slo | None = None
    """What this one is promised, if it is not what all are."""


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


Names = tuple[str, ...]


class Decision:
    """Which server, and why. Nobody changes one.

    What few ask for is made when it is asked for: ``fallbacks`` and ``reasons`` are given as they are, or as functions
    that make them.
    """

    __slots__ = (
        "_fallbacks",
        "_reasons",
        "at_s",
        "estimated_compute_s",
        "estimated_tbt_s",
        "estimated_ttft_s",
        "matched_tokens",
        "plan",
        "request",
        "score",
        "server",
        "strategy",
    )

    def __init__(
        self,
        request: Request,
        server: str,
        fallbacks: Names | Callable[[], Names],
        strategy: str,
        score: float,
        matched_tokens: int,
        reasons: Names | Callable[[], Names],
        at_s: float,
        estimated_ttft_s: float | None = None,
        estimated_tbt_s: float | None = None,
        plan: Plan | None = None,
        estimated_compute_s: float | None = None,
    ) -> None:
        self.request = request
        self.server = server
        self.strategy = strategy
        self.score = score
        self.matched_tokens = matched_tokens
        """Tokens of the prompt that the chosen server is believed to hold."""
        self.at_s = at_s
        self.estimated_ttft_s = estimated_ttft_s
        self.estimated_tbt_s = estimated_tbt_s
        """Of a server that decodes: seconds between tokens, with this request in its batch."""
        self.plan = plan
        """How the server comes by the prompt's KV; None: the strategy does not plan that."""
        self.estimated_compute_s = estimated_compute_s
        """Of ``estimated_ttft_s``, what the server computes for this request alone."""
        self._fallbacks = fallbacks
        self._reasons = reasons

    @property
    def fallbacks(self) -> Names:
        """The other servers that could serve it, best first."""
        found = self._fallbacks
        if not isinstance(found, tuple):
            found = self._fallbacks = found()
        return found

    @property
    def reasons(self) -> Names:
        """Short sentences with figures, in the order in which they weighed."""
        found = self._reasons
        if not isinstance(found, tuple):
            found = self._reasons = found()
        return found

    def __repr__(self) -> str:
        return (
            f"Decision({self.server!r} by {self.strategy}, score {self.score:g}, {self.matched_tokens} tokens matched)"
        )

    def taken_by(self, server: str) -> Decision:
        """The same request where another server took it than the one chosen: what that holds of it is not known."""
        return Decision(
            self.request,
            server,
            tuple(name for name in self.fallbacks if name != server),
            self.strategy,
            self.score,
            0,
            (*self.reasons, f"{self.server} did not take it, {server} did"),
            self.at_s,
            None,
            self.estimated_tbt_s,
            self.plan,
            self.estimated_compute_s,
        )

    @property
    def kind(self) -> str:
        """What it went by: "matched" or "unmatched", with "adapter-" before it where an adapter narrowed the choice."""
        kind = "matched" if self.matched_tokens > 0 else "unmatched"
        narrowed = self.request.adapter and self.reasons and self.reasons[0].startswith("adapter ")
        return "adapter-" + kind if narrowed else kind

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


# Where chains of blocks begin: what two prompts must have in common, beside their text, to share a cache.


_TAG = b"skymemory prefix seed, version 1"
_LENGTH = struct.Struct("<I")


def seed(model: str, adapter: str, salt: str) -> int:
    """64 bits for ``native.chain_hashes``: different where model, adapter or salt differ.

    The first eight bytes, little-endian, of the SHA-256 of a tag and of each word as UTF-8 behind its length (four
    bytes): words cannot run into each other. Lone surrogates, which JSON may bring, are taken as they are.
    """
    message = bytearray(_TAG)
    for word in (model, adapter, salt):
        raw = word.encode("utf-8", "surrogatepass")
        message += _LENGTH.pack(len(raw)) + raw
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")
