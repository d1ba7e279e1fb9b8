"""What a replay sends, and when: a trace's requests at another rate, cut and scaled to what the model takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skymemory.errors import InvalidInput


class Shape(Protocol):
    """A request of a trace, such as ``sim.trace.TraceRequest``: sizes and block ids, no words."""

    @property
    def at_s(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...]:
        """One per begun block of the prompt; equal ids mean equal prefixes."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be sent."""

    number: int
    """Its place in the trace, from 0."""
    due_s: float
    """From the replay's beginning."""
    ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Asks:
    """All of them, in the order in which they are due."""

    asks: tuple[Ask, ...]
    too_long: int
    """Requests left out: prompt and answer together exceed what the model takes."""

    @property
    def prompt_tokens(self) -> int:
        return sum(ask.prompt_tokens for ask in self.asks)


def asks_of(
    shapes: Iterable[Shape],
    *,
    scale: float = 1.0,
    most_output: int | None = None,
    context_tokens: int | None = None,
    span_s: float | None = None,
    most: int | None = None,
) -> Asks:
    """``shapes`` as requests to be sent, the first of them at 0.

    Prompts and answers are ``scale`` times as long as theirs, answers of at most ``most_output`` tokens and at least
    one. Those that do not fit ``context_tokens`` are left out, and so are those due after ``span_s`` or beyond the
    first ``most``.

    Raises:
        InvalidInput: a scale or a limit that leaves nothing by itself, or nothing that remains to be sent.
    """
    if not 0 < scale < 1e6:
        raise InvalidInput(f"lengths cannot be scaled by {scale:g}; name a factor above 0, such as 0.05")
    if (most_output is not None and most_output < 1) or (most is not None and most < 1):
        raise InvalidInput("an answer has at least one token, and a replay at least one request")
    if span_s is not None and not span_s > 0:
        raise InvalidInput(f"nothing is due within {span_s:g} s; name a time above 0")
    ordered = sorted(enumerate(shapes), key=lambda pair: pair[1].at_s)
    begin_s = ordered[0][1].at_s if ordered else 0.0
    asks: list[Ask] = []
    too_long = 0
    for number, shape in ordered:
        due_s = shape.at_s - begin_s
        if len(asks) == most or (span_s is not None and due_s > span_s):
            break
        prompt = max(1, round(shape.input_tokens * scale))
        output = max(1, round(shape.output_tokens * scale))
        output = output if most_output is None else min(output, most_output)
        if context_tokens is not None and prompt + output > context_tokens:
            too_long += 1
            continue
        asks.append(Ask(number, due_s, shape.ids, prompt, output))
    if not asks:
        limit = f"; {too_long} exceed {context_tokens} tokens: scale lengths down" if too_long else ""
        raise InvalidInput(f"no request remains to be sent{limit}")
    return Asks(tuple(asks), too_long)


def reusable_share(asks: Sequence[Ask], block_tokens: float) -> float:
    """Part of all prompt tokens whose block an earlier prompt had in the same place: what one endless cache would hit.

    ``block_tokens``: of one id, after scaling. A prompt's last block counts for what it has.
    """
    seen: set[int] = set()
    reused = 0.0
    for ask in asks:
        leading = next((at for at, one in enumerate(ask.ids) if one not in seen), len(ask.ids))
        reused += min(float(ask.prompt_tokens), leading * block_tokens)
        seen.update(ask.ids)
    total = sum(ask.prompt_tokens for ask in asks)
    return reused / total if total else 0.0
