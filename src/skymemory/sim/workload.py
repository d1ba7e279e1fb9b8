"""Requests of a seeded generator, for where no trace is at hand or other statistics are wanted.

A workload is made of conversations. Each begins with the system prompt of its tenant, perhaps goes on with a document
that others ask about too, then with words of its own; its next turn repeats all that and adds the answer and a new
message. What comes out is what a trace holds (``trace.TraceRequest``), block ids that form a tree of prefixes among it.

``CONVERSATIONS`` has the statistics of Mooncake's conversation trace (its tests compare them); ``TENANTS`` has others:
many system prompts, of which now these and now those are wanted, short questions, long answers, no batches; ``AGENTS``
are agents with tools: long instructions, often the files of one repository, then a loop of some fourteen short calls
and results, seconds apart, that makes the prompt grow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from skymemory.errors import InvalidInput
from skymemory.sim.block_names import BlockNames
from skymemory.sim.trace import BATCH_S, TraceRequest


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution of whole numbers, cut off at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, dice: random.Random) -> int:
        return max(self.least, min(self.most, round(self.median * math.exp(dice.gauss(0, self.sigma)))))


@dataclass(frozen=True, slots=True)
class Popularity:
    """How often which of ``count`` things is wanted: ``1 / rank ** skew``, and whose rank is whose moves on."""

    count: int
    skew: float
    moves_every_s: float = math.inf
    """Ranks go round by ``moves_by`` things, so often."""
    moves_by: int = 0

    def weights(self) -> list[float]:
        """Cumulative, by rank."""
        return list(accumulate(1 / rank**self.skew for rank in range(1, self.count + 1)))

    def draw(self, dice: random.Random, weights: list[float], at_s: float) -> int:
        rank = dice.choices(range(self.count), cum_weights=weights)[0]
        steps = 0 if math.isinf(self.moves_every_s) else math.floor(at_s / self.moves_every_s)
        return (rank + steps * self.moves_by) % self.count


@dataclass(frozen=True, slots=True)
class Workload:
    """What the generator draws from. Times in seconds, lengths in tokens; shares are parts of conversations, 0 to 1."""

    name: str
    conversations_per_s: float
    tenants: Popularity
    system: Spread
    """Length of a tenant's system prompt; drawn once per tenant."""
    documents: Popularity
    document: Spread
    document_share: float
    question: Spread
    """What is the conversation's own in its first turn."""
    job_share: float
    """Conversations that are one short request of ``job`` tokens and no more."""
    job: Spread
    goes_on: float
    """Chance of a second turn."""
    goes_on_growth: float
    """Later turns are likelier: the chance of an end falls as ``turn ** -goes_on_growth``."""
    message: Spread
    long_message_share: float
    long_message: Spread
    pause: Spread
    """From one turn's arrival to the next one's, s."""
    answer: Spread
    curt_share: float
    """Answers of a few tokens."""
    batch_s: float = 0.0
    """Arrivals wait for the next multiple of it; 0: each comes when it comes."""
    most_tokens: int = 126_000


def generate(workload: Workload, duration_s: float, seed: int) -> list[TraceRequest]:
    """``duration_s`` of requests, in the order of arrival; equal arguments give equal requests.

    Conversations began before the first second too, for as long as they may last: the first requests are no
    different from the later ones.

    Raises:
        InvalidInput: a duration that is not above 0.
    """
    if not duration_s > 0:
        raise InvalidInput(f"a workload of {duration_s:g} s has no requests; name a duration above 0")
    dice = random.Random(seed)
    names = BlockNames()
    tenants, documents = workload.tenants.weights(), workload.documents.weights()
    systems = [workload.system.draw(dice) for _ in range(workload.tenants.count)]
    texts = [workload.document.draw(dice) for _ in range(workload.documents.count)]
    requests: list[TraceRequest] = []
    before_s = 6.0 * workload.pause.median
    begins_s, session = -before_s, 0
    while (begins_s := begins_s + dice.expovariate(workload.conversations_per_s)) < duration_s:
        session += 1
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


def _turns(
    workload: Workload, dice: random.Random, begins_s: float, own: int, job: bool
) -> Iterator[tuple[float, int, int]]:
    """Arrival (s), tokens beyond the stem, and tokens of the answer, turn by turn."""
    at_s, turn = begins_s, 1
    while True:
        curt = dice.random() < workload.curt_share
        output = dice.randint(1, 29) if curt else workload.answer.draw(dice)
        arrives_s = math.ceil(at_s / workload.batch_s) * workload.batch_s if workload.batch_s else at_s
        yield arrives_s, own, output
        if job or dice.random() < (1 - workload.goes_on) * turn**-workload.goes_on_growth:
            return
        long = dice.random() < workload.long_message_share
        own += output + (workload.long_message if long else workload.message).draw(dice)
        at_s, turn = at_s + workload.pause.draw(dice), turn + 1


_NO_DOCUMENTS = Popularity(1, 0.0)
CONVERSATIONS = Workload(
    name="conversations",
    conversations_per_s=2.15,
    tenants=Popularity(1, 0.0),
    system=Spread(700, 0.0, 700, 700),
    documents=Popularity(400, 1.0),
    document=Spread(3_500, 0.9, 1_024, 30_000),
    document_share=0.04,
    question=Spread(5_400, 1.25, 200, 120_000),
    job_share=0.17,
    job=Spread(200, 0.02, 191, 215),
    goes_on=0.37,
    goes_on_growth=0.2,
    message=Spread(30, 1.3, 2, 1_000),
    long_message_share=0.25,
    long_message=Spread(3_500, 0.9, 200, 40_000),
    pause=Spread(128, 0.95, 12, 1_800),
    answer=Spread(370, 0.42, 30, 2_000),
    curt_share=0.118,
    batch_s=BATCH_S,
)
TENANTS = Workload(
    name="tenants",
    conversations_per_s=8.0,
    tenants=Popularity(1_500, 0.9, moves_every_s=120.0, moves_by=37),
    system=Spread(4_000, 0.6, 1_024, 16_000),
    documents=_NO_DOCUMENTS,
    document=Spread(1_024, 0.0, 1_024, 1_024),
    document_share=0.0,
    question=Spread(300, 0.8, 20, 4_000),
    job_share=0.0,
    job=Spread(1, 0.0, 1, 1),
    goes_on=0.5,
    goes_on_growth=0.0,
    message=Spread(150, 0.8, 5, 2_000),
    long_message_share=0.0,
    long_message=Spread(1, 0.0, 1, 1),
    pause=Spread(40, 0.6, 5, 300),
    answer=Spread(900, 0.5, 50, 4_000),
    curt_share=0.02,
)
AGENTS = Workload(
    name="agents",
    conversations_per_s=0.4,
    tenants=Popularity(24, 0.8),
    system=Spread(9_000, 0.5, 3_000, 30_000),
    documents=Popularity(60, 0.7),
    document=Spread(8_000, 0.8, 1_024, 40_000),
    document_share=0.5,
    question=Spread(900, 1.0, 50, 20_000),
    job_share=0.0,
    job=Spread(1, 0.0, 1, 1),
    goes_on=0.93,
    goes_on_growth=0.0,
    message=Spread(350, 1.0, 20, 4_000),
    long_message_share=0.2,
    long_message=Spread(4_000, 0.8, 500, 30_000),
    pause=Spread(7, 0.7, 1, 120),
    answer=Spread(130, 0.7, 15, 2_000),
    curt_share=0.0,
)
WORKLOADS = {workload.name: workload for workload in (CONVERSATIONS, TENANTS, AGENTS)}
