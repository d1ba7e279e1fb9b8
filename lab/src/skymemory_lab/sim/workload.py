"""Synthetic workloads: seeded conversations and open-loop Poisson requests. ``sim.families`` has more of them.

A conversation starts with its tenant's system prompt, sometimes a shared document, then its own text. Each further turn
adds the answer and a new message.

``CONVERSATIONS`` has the statistics of Mooncake's conversation trace, ``TENANTS`` many system prompts of changing
popularity, ``AGENTS`` long instructions and short calls.

``OpenLoop`` has the workloads of Mooncake's end-to-end experiments. Their table 2 gives no spread of lengths: here they
are log-normal, but constant for the simulated prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from skymemory.errors import InvalidInput
from skymemory_lab.sim.distributions import Bursts, Lengths, LogNormal, Popularity
from skymemory_lab.sim.trace import BATCH_S, BLOCK_TOKENS, TraceRequest, jittered, read_trace

_NONE = LogNormal(1, 0.0, 1, 1)
_ONE = Popularity(1, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Parameters of the generator: seconds, tokens, shares (0 to 1)."""

    name: str
    conversations_per_s: float
    gap_shape: float = 1.0
    """Shape of the Gamma distribution of the gaps between conversations; 1: Poisson."""
    bursts: Bursts | None = None
    sessions: int = 0
    """Conversations, all begun in the first ``pause``; 0: ``conversations_per_s``."""
    tenants: Popularity
    system: Lengths
    documents: Popularity = _ONE
    document: Lengths = _NONE
    document_share: float = 0.0
    question: Lengths
    job_share: float = 0.0
    """Share of conversations with a single request of ``job`` tokens."""
    job: Lengths = _NONE
    goes_on: float  # probability of a second turn
    goes_on_growth: float = 0.0
    """Exponent by which later ends become less likely: ``turn ** -goes_on_growth``."""
    message: Lengths
    long_message_share: float = 0.0
    long_message: Lengths = _NONE
    pause: LogNormal
    answer: Lengths
    curt_share: float
    """Share of answers of a few tokens."""
    batch_s: float = 0.0
    """Multiple to which arrivals are delayed; 0: no delay."""
    most_tokens: int = 126_000


def generate(workload: Workload, duration_s: float, seed: int) -> list[TraceRequest]:
    """Return ``duration_s`` of requests in order of arrival. Equal arguments give equal requests.

    Raises:
        InvalidInput: a duration of 0 or less.
    """
    if not duration_s > 0:
        raise InvalidInput(f"duration {duration_s:g} s: expected above 0")
    dice = random.Random(seed)
    names = BlockNames()
    tenants, documents = workload.tenants.weights(), workload.documents.weights()
    systems = [workload.system.draw(dice) for _ in range(workload.tenants.count)]
    texts = [workload.document.draw(dice) for _ in range(workload.documents.count)]
    requests: list[TraceRequest] = []
    # Long enough for conversations that began before second 0 to reach their usual mix of turns.
    before_s = 0.0 if workload.sessions else 6.0 * workload.pause.median
    for session, begins_s in enumerate(_begins_s(workload, dice, -before_s, duration_s), 1):
        tenant = workload.tenants.draw(dice, tenants, begins_s + before_s)
        stem: tuple[tuple[str, int, int], ...] = (("system", tenant, systems[tenant]),)
        job = dice.random() < workload.job_share
        if not job and dice.random() < workload.document_share:
            document = workload.documents.draw(dice, documents, begins_s + before_s)
            stem += (("document", document, texts[document]),)
        own = (workload.job if job else workload.question).draw(dice)
        for at_s, own_tokens, output in _turns(workload, dice, begins_s, own, job):
            tokens = sum(part[2] for part in stem) + own_tokens
            if tokens > workload.most_tokens or at_s >= duration_s:
                break
            if at_s >= 0:
                ids = names.of(stem, ("own", session, own_tokens))
                requests.append(TraceRequest(at_s, tokens, output, ids, session))
    return sorted(requests, key=lambda request: request.at_s)


def _begins_s(workload: Workload, dice: random.Random, from_s: float, until_s: float) -> Iterator[float]:
    """Yield when conversations begin."""
    if workload.sessions:
        yield from sorted(dice.uniform(0.0, workload.pause.median) for _ in range(workload.sessions))
        return
    rate, shape, even_s = workload.conversations_per_s, workload.gap_shape, from_s
    while True:
        even_s += dice.expovariate(rate) if shape == 1.0 else dice.gammavariate(shape, 1.0 / (shape * rate))
        begins_s = even_s if workload.bursts is None else workload.bursts.warped_s(even_s)
        if begins_s >= until_s:
            return
        yield begins_s


def _turns(
    workload: Workload, dice: random.Random, begins_s: float, own_tokens: int, job: bool
) -> Iterator[tuple[float, int, int]]:
    """Yield per turn: arrival (s), tokens after the stem, tokens of the answer."""
    at_s, turn = begins_s, 1
    while True:
        curt = dice.random() < workload.curt_share
        output = dice.randint(1, 29) if curt else workload.answer.draw(dice)
        arrives_s = math.ceil(at_s / workload.batch_s) * workload.batch_s if workload.batch_s else at_s
        yield arrives_s, own_tokens, output
        if job or dice.random() < (1 - workload.goes_on) * turn**-workload.goes_on_growth:
            return
        long = dice.random() < workload.long_message_share
        own_tokens += output + (workload.long_message if long else workload.message).draw(dice)
        at_s, turn = at_s + workload.pause.draw(dice), turn + 1


CONVERSATIONS = Workload(
    name="conversations",
    conversations_per_s=2.15,
    tenants=Popularity(1, 0.0),
    system=LogNormal(700, 0.0, 700, 700),
    documents=Popularity(400, 1.0),
    document=LogNormal(3_500, 0.9, 1_024, 30_000),
    document_share=0.04,
    question=LogNormal(5_400, 1.25, 200, 120_000),
    job_share=0.17,
    job=LogNormal(200, 0.02, 191, 215),
    goes_on=0.37,
    goes_on_growth=0.2,
    message=LogNormal(30, 1.3, 2, 1_000),
    long_message_share=0.25,
    long_message=LogNormal(3_500, 0.9, 200, 40_000),
    pause=LogNormal(128, 0.95, 12, 1_800),
    answer=LogNormal(370, 0.42, 30, 2_000),
    curt_share=0.118,
    batch_s=BATCH_S,
)
TENANTS = Workload(
    name="tenants",
    conversations_per_s=8.0,
    tenants=Popularity(1_500, 0.9, moves_every_s=120.0, moves_by=37),
    system=LogNormal(4_000, 0.6, 1_024, 16_000),
    question=LogNormal(300, 0.8, 20, 4_000),
    goes_on=0.5,
    message=LogNormal(150, 0.8, 5, 2_000),
    pause=LogNormal(40, 0.6, 5, 300),
    answer=LogNormal(900, 0.5, 50, 4_000),
    curt_share=0.02,
)
AGENTS = Workload(
    name="agents",
    conversations_per_s=0.4,
    tenants=Popularity(24, 0.8),
    system=LogNormal(9_000, 0.5, 3_000, 30_000),
    documents=Popularity(60, 0.7),
    document=LogNormal(8_000, 0.8, 1_024, 40_000),
    document_share=0.5,
    question=LogNormal(900, 1.0, 50, 20_000),
    goes_on=0.93,
    message=LogNormal(350, 1.0, 20, 4_000),
    long_message_share=0.2,
    long_message=LogNormal(4_000, 0.8, 500, 30_000),
    pause=LogNormal(7, 0.7, 1, 120),
    answer=LogNormal(130, 0.7, 15, 2_000),
    curt_share=0.0,
)
WORKLOADS = {workload.name: workload for workload in (CONVERSATIONS, TENANTS, AGENTS)}


class BlockNames:
    """Ids of blocks, numbered by first appearance; equal ids mean equal prefixes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, stem: tuple[tuple[str, int, int], ...], own: tuple[str, int, int]) -> tuple[int, ...]:
        """Return the ids of a prompt of these parts (kind, which, tokens). ``own`` is unique to it."""
        ids = []
        # A block is named by the parts up to its end: two prompts share it if all of these are equal.
        begin, shared = 0, 0
        for end_of in range(1, len(stem) + 1):
            shared += stem[end_of - 1][2]
            while (begin + 1) * BLOCK_TOKENS <= shared:
                ids.append(self._number((stem[:end_of], begin)))
                begin += 1
        tokens = shared + own[2]
        while (begin + 1) * BLOCK_TOKENS <= tokens:
            ids.append(self._number((own[:2], begin)))
            begin += 1
        if begin * BLOCK_TOKENS < tokens:
            ids.append(self._number((own, begin)))  # partial: the next turn fills it and changes its id
        return tuple(ids)

    def _number(self, parts: tuple[object, ...]) -> int:
        return self._numbers.setdefault(parts, len(self._numbers))


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Workload of independent requests."""

    name: str
    prompt: LogNormal
    answer: LogNormal
    shared: float = 0.0
    """Share of a prompt that comes from ``prefixes``, 0 to below 1."""
    prefixes: Popularity = _ONE

    def __post_init__(self) -> None:
        if not 0 <= self.shared < 1:
            raise InvalidInput(f"workload {self.name!r}: shared is {self.shared:g}; expected 0 to below 1")


def poisson(workload: OpenLoop, rate_per_s: float, count: int, seed: int) -> list[TraceRequest]:
    """Return ``count`` requests of a Poisson process. Another rate scales the arrivals of the same requests."""
    if not 0 < rate_per_s < math.inf or count < 1:
        raise InvalidInput(f"{count} requests at {rate_per_s:g}/s; expected at least 1, at a rate above 0")
    # Two generators: another rate or another workload keeps the same sequence of arrivals.
    dice, clock = random.Random(seed), random.Random(seed + 1)
    names = BlockNames()
    weights = workload.prefixes.weights()
    lengths = [workload.prompt.draw(dice) for _ in range(workload.prefixes.count)]
    requests, unit_s = [], 0.0
    for number in range(count):
        unit_s += clock.expovariate(1.0)
        stem: tuple[tuple[str, int, int], ...] = ()
        if workload.shared:
            which = workload.prefixes.draw(dice, weights, unit_s)
            tokens = lengths[which]
            stem = (("prefix", which, round(tokens * workload.shared)),)
        else:
            tokens = workload.prompt.draw(dice)
        ids = names.of(stem, ("own", number, tokens - sum(part[2] for part in stem)))
        answer = workload.answer.draw(dice)
        requests.append(TraceRequest(unit_s / rate_per_s, tokens, answer, ids, session=number))
    return requests


def _about(mean: float, sigma: float, least: int, most: int) -> LogNormal:
    # exp(sigma² / 2) is the mean of a log-normal distribution over its median.
    return LogNormal(mean / math.exp(sigma * sigma / 2), sigma, least, most)


def _exactly(tokens: int) -> LogNormal:
    return LogNormal(tokens, 0.0, tokens, tokens)


ARXIV = OpenLoop("arxiv", _about(8_088, 0.5, 500, 64_000), _about(229, 0.4, 20, 1_500))
L_EVAL = OpenLoop("l-eval", _about(19_019, 0.5, 3_000, 120_000), _about(72, 0.6, 1, 1_000), 0.97, Popularity(48, 0.0))
SIMULATED = tuple(
    OpenLoop(f"simulated-{thousand}k", _exactly(thousand * 1024), _exactly(512), 0.5, Popularity(24, 0.0))
    for thousand in (16, 32, 64, 128)
)
OPEN_LOOPS = {workload.name: workload for workload in (ARXIV, L_EVAL, *SIMULATED)}


def scaled(workload: OpenLoop, prefixes: int) -> OpenLoop:
    return replace(workload, prefixes=replace(workload.prefixes, count=prefixes))


class RequestSource(Protocol):
    """Short description of requests, which sweeps send to processes instead."""

    @property
    def name(self) -> str: ...

    def requests(self) -> list[TraceRequest]: ...


HOUR_S = 3_537.0
"""Duration of the conversation trace."""
QUICK_S = 600.0


@dataclass(frozen=True, slots=True)
class ConversationSource:
    """The conversation trace, or the generator with its statistics."""

    trace: Path | None
    seed: int = 0
    quick: bool = False

    @property
    def name(self) -> str:
        what = "the conversation trace" if self.trace is not None else "the seeded generator instead of the trace"
        return f"{what}, first {QUICK_S:g} s" if self.quick else what

    def requests(self) -> list[TraceRequest]:
        """Return the requests in order of arrival, with batches spread.

        Raises:
            InvalidInput: not a trace.
            OSError: it cannot be read.
        """
        return _requests(self)


@lru_cache(maxsize=2)
def _requests(source: ConversationSource) -> list[TraceRequest]:
    if source.trace is not None:
        requests = read_trace(source.trace)
    else:
        seconds = QUICK_S if source.quick else HOUR_S
        requests = generate(WORKLOADS["conversations"], seconds, seed=100 + source.seed)
    requests = jittered(requests, source.seed, BATCH_S)
    return [request for request in requests if request.at_s < QUICK_S] if source.quick else requests


@dataclass(frozen=True, slots=True)
class OpenSource:
    """Poisson requests of ``OPEN_LOOPS[workload]``."""

    workload: str
    rate_per_s: float
    count: int
    seed: int = 0
    prefixes: int | None = None

    @property
    def name(self) -> str:
        return f"{self.workload}, Poisson"

    def requests(self) -> list[TraceRequest]:
        workload = OPEN_LOOPS[self.workload]
        if self.prefixes is not None:
            workload = scaled(workload, self.prefixes)
        return poisson(workload, self.rate_per_s, self.count, self.seed)
