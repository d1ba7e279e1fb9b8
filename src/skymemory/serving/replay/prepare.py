"""What is asked of a server before a replay: what it serves, which fields it takes, how it counts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.serving.replay.calibration import PROBE_WORDS, Measure, measured, probes
from skymemory.serving.replay.client import FEATURES, Client, Clock
from skymemory.serving.replay.outcome import Outcome, Status
from skymemory.serving.replay.prompts import Prompt

_PROBE_ANSWER = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    model: str
    context_tokens: int | None
    """What prompt and answer may have together, where the endpoint says so."""
    notes: tuple[str, ...]
    """What it does not do, in words."""


async def look(client: Client, model: str | None) -> Prepared:
    """Find the model; afterwards the client asks for it.

    Raises:
        InvalidInput: several models and none named, or one that is not there.
        SkyMemoryError: the endpoint lists none.
    """
    listed = await client.models()
    names = [name for name, _ in listed]
    if model is None and len(listed) != 1:
        raise InvalidInput(f"--model: name one of {', '.join(names) or 'those the endpoint serves (it lists none)'}")
    if model is not None and names and model not in names:
        raise InvalidInput(f"--model {model!r}: the endpoint serves {', '.join(names)}")
    chosen = names[0] if model is None else model
    client.target = replace(client.target, model=chosen)
    return Prepared(chosen, dict(listed).get(chosen), ())


async def agree(client: Client, prompt: Prompt, clock: Clock) -> tuple[Outcome, tuple[str, ...]]:
    """Ask with as many of ``FEATURES`` as the endpoint takes: the first answer, and what it does not take, in words.

    Raises:
        SkyMemoryError: it answers in no way that can be measured.
    """
    for features in FEATURES:
        client.target = replace(client.target, features=features)
        outcome = await client.probe(prompt, _PROBE_ANSWER, clock)
        if outcome.http_status not in (400, 422) or not features:
            break
    if outcome.status is not Status.COMPLETED:
        raise SkyMemoryError(f"{client.target.door}: {outcome.error}")
    notes = []
    if "ignore_eos" not in features:
        notes.append("it does not take ignore_eos: answers may be shorter than the trace's")
    if outcome.prompt_tokens is None:
        notes.append("it tells no usage: lengths of prompts and answers, and hits, are unknown")
    elif outcome.cached_tokens is None:
        notes.append("it does not tell cached_tokens: hits are unknown (vLLM: --enable-prompt-tokens-details)")
    return outcome, tuple(notes)


async def calibrate(
    client: Client, words: Sequence[str], seed: int, context_tokens: int | None, clock: Clock
) -> tuple[Measure, tuple[str, ...]]:
    """How the endpoint counts ``words``; afterwards the client asks with the fields that it takes.

    Raises:
        SkyMemoryError: it does not answer, or tells no lengths.
    """
    most = PROBE_WORDS if context_tokens is None else min(PROBE_WORDS, context_tokens // 4)
    short, long = probes(words, seed, max(8, most))
    first, notes = await agree(client, short, clock)
    if first.prompt_tokens is None:
        raise SkyMemoryError(
            "the server tells no usage.prompt_tokens, by which prompts are made as long as wanted: "
            "--prompt-unit characters does without"
        )
    second = await client.probe(long, _PROBE_ANSWER, clock)
    if second.prompt_tokens is None:
        raise SkyMemoryError(f"{client.target.door}: {second.error or 'it told no usage the second time'}")
    return measured(short, first.prompt_tokens, long, second.prompt_tokens), notes
