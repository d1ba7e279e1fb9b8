"""Comparison of a model on board a satellite with a model on the ground: time and energy to the first token.

SkyMemory paper §3.7 and §6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput
from skymemory_lab.sim.sky.breakeven import BreakEven
from skymemory_lab.sim.sky.physical import LinkRates

TOKEN_BYTES = 4
GROUND_W = 700.0
"""Maximum power of the NVIDIA H100 SXM (data sheet)."""
BOARD_W = 60.0
"""Maximum power of the NVIDIA Jetson AGX Orin 64GB (data sheet)."""
READ_J_PER_BYTE = 8 * 30e-12
"""Energy of a read and a write of DRAM: 1.3 to 2.6 nJ for 64 bits (Horowitz, "Computing's energy problem", ISSCC
2014).
"""
LINK_J_PER_BYTE = 8 * 80e-9
"""Energy per link and beam, of a laser terminal of 8 W at 100 Mbit/s (Tesat's CubeLCT); larger terminals need less."""

TERMINAL_W = 100.0
"""Power of a user terminal with router and power supply (Starlink's Standard kit: 75 to 100 W on average)."""
STANDBY_W_PER_BYTE = 74e-3 * 1.2 / 2**31
"""Power of DRAM that holds data: 74 mA at 1.2 V for 16 Gbit (Micron, 16Gb TwinDie DDR4 data sheet, IDD2N of x16)."""


@dataclass(frozen=True, slots=True)
class OnboardComputer:
    """Prefill speed and power of a computer, on board or on the ground."""

    tokens_per_s: float
    watts: float

    def __post_init__(self) -> None:
        for name, value in (("tokens a second", self.tokens_per_s), ("watts", self.watts)):
            if not 0 < value < math.inf:
                raise InvalidInput(f"{value:g} {name}: expected more than 0")


@dataclass(frozen=True, slots=True)
class PromptTime:
    """Result of a prompt; ``joules`` exclude the power to hold the KV (``held_w``)."""

    way: str  # compute, load or both, whichever is the fastest
    ttft_s: float
    joules: float


def held_w(tokens: int, kv_bytes_per_token: int) -> float:
    """Return the power of DRAM to hold a prompt's KV."""
    return tokens * kv_bytes_per_token * STANDBY_W_PER_BYTE


@dataclass(frozen=True)
class Places:
    """Hosts on the ground and on board a satellite.

    On board only prompt and token pass the beam; a slower machine computes, with KV over inter-satellite links.
    """

    ground: BreakEven
    board: BreakEven
    rates: LinkRates
    beam_s: float  # light, one way
    ground_hops: float  # mean inter-satellite links to a server
    board_hops: float

    def on_ground(self, tokens: int, machine: OnboardComputer, kv_bytes_per_token: int) -> PromptTime:
        moved = self.ground_hops + 1.0
        answer = self._answer(self.ground, self.rates.down_bit_s, tokens, machine, kv_bytes_per_token, moved)
        terminal_s = 0.0 if answer.way == "compute" else answer.ttft_s
        return replace(answer, joules=answer.joules + terminal_s * TERMINAL_W)

    def on_board(self, tokens: int, machine: OnboardComputer, kv_bytes_per_token: int) -> PromptTime:
        answer = self._answer(self.board, self.rates.isl_bit_s, tokens, machine, kv_bytes_per_token, self.board_hops)
        up_s = 8 * TOKEN_BYTES * tokens / (self.rates.up_bit_s or math.inf)
        down_s = 8 * TOKEN_BYTES / (self.rates.down_bit_s or math.inf)
        beam_j = TOKEN_BYTES * (tokens + 1) * LINK_J_PER_BYTE
        ttft_s = 2 * self.beam_s + up_s + answer.ttft_s + down_s
        return PromptTime(answer.way, ttft_s, answer.joules + beam_j + ttft_s * TERMINAL_W)

    def _answer(
        self, even: BreakEven, rate: float | None, tokens: int, machine: OnboardComputer, kv_bytes: int, links: float
    ) -> PromptTime:
        # Return the fastest way, without the beam; loaded bytes pass ``links`` links.
        cell = even.cell(tokens, machine.tokens_per_s, rate or 1e15, kv_bytes)
        seconds = {"compute": cell.compute_s, "load": cell.load_s, "both": cell.both_s}[cell.best]
        # With both at once, computing lasts as long as the whole.
        computed_s = {"compute": seconds, "load": 0.0, "both": seconds}[cell.best]
        loaded = 1.0 - computed_s / cell.compute_s
        moved_j = loaded * tokens * kv_bytes * (2 * READ_J_PER_BYTE + links * LINK_J_PER_BYTE)
        return PromptTime(cell.best, seconds, computed_s * machine.watts + moved_j)
