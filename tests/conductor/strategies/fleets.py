"""Fleets and prompts that tests of strategies are made of."""

from __future__ import annotations

import numpy as np

from skymemory.conductor.picker import Fleet, Picker, Scorer
from skymemory.conductor.request import Decision, Prompt, Request

BLOCK_TOKENS = 16


def a_fleet(servers: int) -> Fleet:
    fleet = Fleet()
    for number in range(servers):
        fleet.add(f"s{number}")
    return fleet


def a_prompt(*runs: tuple[int, int], seed: int = 0, extra_tokens: int = 0) -> Prompt:
    """Runs of (text, blocks): equal runs at the front are equal prefixes; another ``seed`` shares nothing."""
    runs_of_pieces = [np.random.default_rng((seed, text)).integers(1, 2**63, length) for text, length in runs]
    pieces = np.concatenate([np.empty(0, dtype=np.int64), *runs_of_pieces]).astype(np.uint64)
    blocks, chain = [], seed
    for piece in pieces.tolist():
        chain = hash((chain, piece)) & (2**64 - 1)
        blocks.append(chain)
    return Prompt(
        np.array(blocks, dtype=np.uint64),
        pieces,
        BLOCK_TOKENS,
        len(blocks) * BLOCK_TOKENS + extra_tokens,
        head=b"".join(f"text {text} ".encode() * 20 for text, _ in runs)[:1024],
    )


def a_request(*runs: tuple[int, int], seed: int = 0, **named: str) -> Request:
    return Request(a_prompt(*runs, seed=seed), **named)  # type: ignore[arg-type]


def serve(picker: Picker, request: Request, now_s: float = 0.0, among: set[str] | None = None) -> Decision:
    """Pick, send, answer and end at once."""
    decision = picker.pick(request, now_s, among)
    picker.routed(decision, now_s)
    picker.succeeded(decision, now_s)
    picker.on_request_end(decision, now_s)
    return decision


def scores(scorer: Scorer, request: Request, fleet: Fleet, now_s: float = 0.0) -> dict[str, float]:
    servers = list(fleet)
    ranking = scorer.rank(request, servers, now_s)
    return {server.name: score for server, score in zip(servers, ranking.scores, strict=True)}
