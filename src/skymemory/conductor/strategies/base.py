"""The contract of every strategy.

A scorer ranks servers for a request and learns from what becomes of requests. It does no I/O, reads no clock and rolls
no dice of its own: equal calls give equal scores. ``picker.Picker`` does the rest for all of them: who may be chosen at
all, adapters, ties, counting what is in flight.

Behind the contract stands what several strategies share: notes of what was sent, loads and their bound, the threshold
of a prefix, and hashes that are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from skymemory.conductor.fleet import Server
from skymemory.conductor.request import Plan, Request
from skymemory.errors import InvalidInput

Weights = tuple[tuple[str, Sequence[float]], ...]


Standing = tuple[float, int, float | None, float | None, Plan | None, float | None, tuple[tuple[str, float], ...]]
"""What a ranking says of one server: its score, the tokens matched, the time to its first token and between tokens,
its plan, what of the first it computes, and its figures in ``weights``. A plain tuple, since every request makes one.
"""


class Ranking:
    """One entry per server that was asked about, in that order."""

    __slots__ = ("_compute_s", "_matched", "_scores", "_ttft_s", "_weights", "estimated_tbt_s", "plans", "reasons")

    def __init__(
        self,
        scores: Sequence[float],
        matched_tokens: Sequence[int] | None = None,
        estimated_ttft_s: Sequence[float] | None = None,
        reasons: tuple[str, ...] = (),
        weights: Weights = (),
        estimated_tbt_s: Sequence[float] | None = None,
        plans: Sequence[Plan] | None = None,
        estimated_compute_s: Sequence[float] | None = None,
    ) -> None:
        self._scores, self._matched = scores, matched_tokens
        self._ttft_s, self._compute_s, self._weights = estimated_ttft_s, estimated_compute_s, weights
        self.reasons = reasons
        """Why it came out so, as far as it is the same for all servers."""
        self.estimated_tbt_s = estimated_tbt_s
        """Seconds between tokens, of servers that decode."""
        self.plans = plans
        """How each would come by the prompt's KV."""

    @property
    def scores(self) -> Sequence[float]:
        """Higher is better. Equal scores are a tie, and the picker breaks it."""
        return self._scores

    @property
    def matched_tokens(self) -> Sequence[int] | None:
        """Tokens of the prompt that each is believed to hold; None where the strategy does not know of caches."""
        return self._matched

    @property
    def estimated_ttft_s(self) -> Sequence[float] | None:
        return self._ttft_s

    @property
    def estimated_compute_s(self) -> Sequence[float] | None:
        """Of ``estimated_ttft_s``, what each would compute; where there are plans, they say it."""
        return self._compute_s

    @property
    def weights(self) -> Weights:
        """Named parts of the scores, one figure per server: the chosen one's are told as reasons."""
        return self._weights

    @property
    def packed(self) -> Sequence[float] | bytes:
        """The scores, as they are kept by who may be asked for them later."""
        return self._scores

    def best(self) -> Sequence[int]:
        """Places of the highest score."""
        scores = self.scores
        best = max(scores)
        return [at for at, score in enumerate(scores) if score == best]

    def standing(self, at: int) -> Standing:
        matched, ttft_s, tbt_s = self.matched_tokens, self.estimated_ttft_s, self.estimated_tbt_s
        plan = None if self.plans is None else self.plans[at]
        compute_s = self.estimated_compute_s
        return (
            self.scores[at],
            0 if matched is None else matched[at],
            None if ttft_s is None else ttft_s[at],
            None if tbt_s is None else tbt_s[at],
            plan,
            plan.compute_s if plan is not None else None if compute_s is None else compute_s[at],
            tuple((name, figures[at]) for name, figures in self.weights),
        )


def unpacked(scores: Sequence[float] | bytes) -> Sequence[float]:
    """What ``Ranking.packed`` gave."""
    return memoryview(scores).cast("d") if isinstance(scores, bytes) else scores


class Scorer(Protocol):
    """A strategy."""

    name: str

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        """Scores of ``servers`` (at least one) for ``request``. Changes nothing that a later call could see."""
        ...

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        """``request`` goes to ``server``. Nothing is known yet of how that will end."""
        ...

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        """The first byte of its answer came: the server has computed the prompt and holds it.

        ``cached_tokens``: of the prompt, what the server says it did not have to compute, where it says so.
        """
        ...

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        """Its answer has ended and says of how many tokens of the prompt the server had what it needs.

        Comes after ``succeeded`` where the server says so only with the end of its answer, as OpenAI's usage does.
        """
        ...

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        """Its last byte came, or it was given up after ``succeeded``. Comes once, before ``corrected``.

        ``output_tokens``: of its answer, where that came to its end and says so.
        """
        ...

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        """It ended before the first byte: nothing may be believed to be cached by it."""
        ...

    def forget(self, server: Server) -> None:
        """The server left the fleet, or restarted: nothing it held is there any more."""
        ...


class Forgetful:
    """What a strategy does that learns nothing."""

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        pass

    def succeeded(self, request: Request, server: Server, now_s: float, cached_tokens: int | None) -> None:
        pass

    def corrected(self, request: Request, server: Server, now_s: float, cached_tokens: int) -> None:
        pass

    def ended(self, request: Request, server: Server, now_s: float, output_tokens: int | None = None) -> None:
        pass

    def failed(self, request: Request, server: Server, now_s: float) -> None:
        pass

    def forget(self, server: Server) -> None:
        pass


# --- what was noted when a request was sent ---


Note = TypeVar("Note")


class Tickets(Generic[Note]):
    """One note per request and server. The same request may be sent to a server twice; then the first note is first.

    Requests are told apart as objects (two equal ones may be under way), and kept alive here, so that no other gets
    the number of one that is gone.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[Request, Note]] = {}
        self._further: dict[tuple[int, int], list[Note]] = {}
        """Of requests that were sent to a server again: few."""

    def __len__(self) -> int:
        return len(self._open) + sum(map(len, self._further.values()))

    def note(self, request: Request, server: Server, note: Note) -> None:
        key = (id(request), server.slot)
        if key in self._open:
            self._further.setdefault(key, []).append(note)
        else:
            self._open[key] = (request, note)

    def take(self, request: Request, server: Server) -> Note | None:
        """The note; None where there is none, as after ``forget``."""
        key = (id(request), server.slot)
        found = self._open.pop(key, None)
        if found is None:
            return None
        if key in self._further:
            self._open[key] = (request, self._further[key].pop(0))
            if not self._further[key]:
                del self._further[key]
        return found[1]

    def forget(self, server: Server) -> None:
        for key in [key for key in self._open if key[1] == server.slot]:
            del self._open[key]
            self._further.pop(key, None)


# --- how many requests servers have, and the bound over which one is passed by ---


STALE_S = 5.0
"""A report older than this says nothing."""


def requests_at(server: Server, now_s: float) -> float:
    """Requests at a server: it may have others than ours, and its report may be older than what we sent since."""
    report = server.reported
    if report is None or now_s - report.at_s > STALE_S:
        return float(server.in_flight)
    return float(max(server.in_flight, report.waiting + report.running))


def loads_of(servers: Sequence[Server], now_s: float) -> list[float]:
    return [requests_at(server, now_s) for server in servers]


def most_allowed(loads: Sequence[float], factor: float) -> int:
    """Requests a server may have with the new one: the next whole number over ``factor`` × the mean.

    Rounded up, as in Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016). Rounded down,
    no server of eight could take a second request while one is under way, and all would go to the ring's first.
    """
    return math.ceil(factor * (sum(loads) + 1.0) / len(loads))


def check_factor(factor: float) -> None:
    if not (1.0 <= factor < math.inf):
        raise InvalidInput(f"load_factor is {factor}; expected 1 or more, such as 1.25")


# --- when a prefix is worth following: the threshold that every prefix strategy shares ---


@dataclass(frozen=True, slots=True)
class GainThreshold:
    """More than ``tokens`` must match, and more than ``ratio`` of the prompt; nothing matched is never worth it.

    One of them at 0 leaves the other to decide alone. Below the threshold only load counts (prefix-aware-routing:
    "only use prefix affinity if the expected gain is high enough", by length, by ratio, or by both).
    """

    tokens: int = 0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InvalidInput(f"min_match_tokens is {self.tokens}; expected 0 or more")
        if not 0.0 <= self.ratio < 1.0:
            raise InvalidInput(f"min_match_ratio is {self.ratio}; expected 0 or more and less than 1")

    def worth(self, matched_tokens: float, prompt_tokens: int) -> bool:
        return matched_tokens > self.tokens and matched_tokens > self.ratio * prompt_tokens

    def why_not(self, matched_tokens: float, prompt_tokens: int) -> str:
        """The reason to tell when it is not worth it."""
        if not prompt_tokens:
            return "load only: the prompt is empty"
        if matched_tokens <= 0:
            return f"load only: nothing of the prompt's {prompt_tokens} tokens matches anywhere"
        asked = [f"{self.tokens} tokens"] if self.tokens else []
        asked += [f"{self.ratio:.0%} of the prompt"] if self.ratio else []
        return (
            f"load only: the best match, {matched_tokens:.0f} of {prompt_tokens} tokens,"
            f" is not over the threshold of {' and '.join(asked)}"
        )


# --- hashes of words that are the same on every machine ---


_MASK = (1 << 64) - 1


def hash_words(*words: bytes) -> int:
    """64 bits of several words; each with its length, so that no two lists of words are confused."""
    state = blake2b(digest_size=8)
    for word in words:
        state.update(len(word).to_bytes(8, "little"))
        state.update(word)
    return int.from_bytes(state.digest(), "little")


def scope_of(request: Request) -> tuple[bytes, bytes, bytes]:
    """What separates caches whatever the text: model, adapter, salt."""
    return request.model.encode(), request.adapter.encode(), request.salt.encode()


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each of ``values`` scattered over 64 bits (the finish of splitmix64)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class NameHashes:
    """Hashes of server names, each computed once."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def of(self, name: str) -> int:
        known = self._of.get(name)
        if known is None:
            if len(self._of) >= 4096:
                self._of.clear()
            known = self._of[name] = hash_words(name.encode())
        return known
