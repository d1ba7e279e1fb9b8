"""A weighted sum of queue, KV use and matched prefix, with a table of what servers probably hold.

Source: the Gateway API inference extension's endpoint picker: prefix matched / total with weight 3, queue and KV use
with weight 2 each; its queue scorer puts the shortest queue at 1 and the longest at 0, its KV scorer is 1 − use. Done
otherwise: the table counts contiguous matches, evicts a prefix's head last, takes back what failed, and takes the
capacity that servers report; between two reports of a server what we sent it since counts; a server that reports
nothing is taken for an average one, not for an empty one. The prefix is never normalised by the best server: one
matched block would then weigh as much as a whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skymemory.conductor.fleet import Server
from skymemory.conductor.prefix_index.base import PrefixIndex
from skymemory.conductor.request import Prompt, Request
from skymemory.conductor.strategies.base import Ranking
from skymemory.conductor.strategies.gain import GainThreshold
from skymemory.conductor.strategies.indexed import MOST_UNDER_WAY, Indexed
from skymemory.conductor.strategies.loads import STALE_S
from skymemory.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class WeightedSettings:
    queue_weight: float = 2.0
    kv_weight: float = 2.0
    prefix_weight: float = 3.0
    min_match_tokens: int = 0
    min_match_ratio: float = 0.0

    def __post_init__(self) -> None:
        if min(self.queue_weight, self.kv_weight, self.prefix_weight) < 0:
            raise InvalidInput("a weight is negative; expected 0 or more, such as 2, 2 and 3")


@dataclass(frozen=True, slots=True)
class ApproximateSettings(WeightedSettings):
    blocks_per_server: int = 31_250
    """What is believed of a server that does not report the size of its cache."""
    max_match_blocks: int = 256
    """Of a prompt, blocks that count; 0: all."""


class Approximate(Indexed):
    """Of queue, KV use and prefix; the index says what is believed to be held."""

    name = "approximate"

    def __init__(
        self, index: PrefixIndex, settings: WeightedSettings | None = None, under_way_blocks: int = MOST_UNDER_WAY
    ) -> None:
        super().__init__(index, under_way_blocks)
        self.settings = settings or ApproximateSettings()
        self._since: dict[int, tuple[float, int]] = {}
        """By slot: of when its latest report is, and how many requests it was sent since."""
        self._gain = GainThreshold(self.settings.min_match_tokens, self.settings.min_match_ratio)

    def rank(self, request: Request, servers: Sequence[Server], now_s: float) -> Ranking:
        tokens, settings = request.prompt.tokens, self.settings
        matched, shares = self.held(request.prompt, servers)
        reasons: tuple[str, ...] = ()
        if not any(self._gain.worth(share * tokens, tokens) for share in shares):
            reasons = (self._gain.why_not(max(shares) * tokens, tokens),)
            shares = [0.0] * len(servers)
        queues, room = self._loads(servers, now_s)
        shortest, longest = min(queues), max(queues)
        per_waiting = settings.queue_weight / (longest - shortest) if longest > shortest else 0.0
        scores = [
            settings.queue_weight - per_waiting * (queue - shortest)
            + settings.kv_weight * free
            + settings.prefix_weight * share
            for queue, free, share in zip(queues, room, shares, strict=True)
        ]  # fmt: skip
        weights = (("requests waiting", queues), ("KV cache free", room), ("share of the prompt held", shares))
        return Ranking(scores, matched, reasons=reasons, weights=weights)

    def held(self, prompt: Prompt, servers: Sequence[Server]) -> tuple[list[int], list[float]]:
        """Tokens of the prompt that each server holds, and what they count: a part of the prompt, 0 to 1."""
        matched = self.matched_tokens(prompt, self.matched_blocks(prompt, servers))
        return matched, [tokens / prompt.tokens if tokens else 0.0 for tokens in matched]

    def routed(self, request: Request, server: Server, now_s: float) -> None:
        super().routed(request, server, now_s)
        if (report := server.reported) is not None:
            at_s, sent = self._since.get(server.slot, (report.at_s, 0))
            self._since[server.slot] = report.at_s, sent + 1 if at_s == report.at_s else 1

    def forget(self, server: Server) -> None:
        super().forget(server)
        self._since.pop(server.slot, None)

    def _loads(self, servers: Sequence[Server], now_s: float) -> tuple[list[float], list[float]]:
        """Requests that wait for their prefill, and the free part of the KV cache."""
        queues: list[float] = []
        free: list[float | None] = []
        for server in servers:
            report = server.reported
            if report is None or now_s - report.at_s > STALE_S:
                queues.append(float(server.prefilling))
                free.append(None)
            else:
                at_s, sent = self._since.get(server.slot, (report.at_s, 0))
                queues.append(float(report.waiting + (min(sent, server.prefilling) if at_s == report.at_s else 0)))
                free.append(1.0 - report.kv_usage)
        known = [share for share in free if share is not None]
        usual = sum(known) / len(known) if known else 1.0
        return queues, [usual if share is None else share for share in free]
