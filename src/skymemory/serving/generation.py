"""One request of the engine once it is read: tokens in, how to choose tokens, when to stop."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 1.0
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability are drawn from."""
    seed: int | None = None
    """None draws differently each time."""


@dataclass(frozen=True, slots=True)
class Generation:
    ids: npt.NDArray[np.int64] = field(repr=False)
    """The prompt, at least one token."""
    max_tokens: int
    """At least one; prompt and answer fit the context."""
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()
    """The answer ends before the first of these that it would contain."""
    ignore_eos: bool = False
    salt: str = ""
    """Prompts of different salts never share a cache."""
    stream: bool = False
    include_usage: bool = False
    """A stream ends with a chunk that has the usage."""
    chat: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine says of a request as it goes on. The first step means: the prompt is computed."""

    text: str
    """What comes behind the text of the steps before."""
    completion_tokens: int
    """Generated so far."""
    cached_tokens: int
    """Of the prompt, what the prefix cache supplied."""
    finish: str | None = None
    """"stop" or "length" in the last step."""
    error: str | None = None
    """Why it ended before it was done; the last step, too."""

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None
