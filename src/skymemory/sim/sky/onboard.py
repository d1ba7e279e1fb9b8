"""A model on board a satellite, or on the ground: which gives a prompt's first token sooner, and for how much energy.

SkyMemory paper §3.7 and §6. On the ground a prompt's KV is computed, or comes down over the beam. On board the prompt
goes up and the token comes down, a few bytes each; its KV is computed by a slower machine, or comes over the links
between satellites alone. Both load as they do in ``breakeven``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from skymemory.errors import InvalidInput
from skymemory.sim.sky.breakeven import BreakEven
from skymemory.sim.sky.physical import LinkRates

TOKEN_BYTES = 4
"""Of a token's number on the way up or down; its text is as long."""
GROUND_W = 700.0
"""NVIDIA H100 SXM: its data sheet's largest power, all of it, for as long as it computes."""
BOARD_W = 60.0
"""NVIDIA Jetson AGX Orin 64GB: its data sheet's largest power."""
READ_J_PER_BYTE = 8 * 30e-12
"""DRAM, 1.3 to 2.6 nJ for 64 bits (Horowitz, "Computing's energy problem", ISSCC 2014): read once, written once."""
LINK_J_PER_BYTE = 8 * 80e-9
"""A laser terminal of 8 W at 100 Mbit/s (Tesat's CubeLCT), for each link and for the beam: an upper bound, since larger
terminals carry more for a watt."""

TERMINAL_W = 100.0
"""A user terminal with router and power supply: SpaceX's specification of Starlink's Standard kit has 75 to 100 W on
average. While KV comes down; for an answer from on board, until it is there."""
STANDBY_W_PER_BYTE = 74e-3 * 1.2 / 2**31
"""DRAM that holds and is not read: 74 mA at 1.2 V for 16 Gbit (Micron, 16Gb TwinDie DDR4 data sheet, IDD2N of x16)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What computes a prompt: prefilled tokens per second, and watts meanwhile."""

    tokens_per_s: float
    watts: float

    def __post_init__(self) -> None:
        for name, value in (("tokens a second", self.tokens_per_s), ("watts", self.watts)):
            if not 0 < value < math.inf:
                raise InvalidInput(f"{value:g} {name}: expected more than 0")


@dataclass(frozen=True, slots=True)
class Answer:
    """``way``: compute, load or both. Seconds to the first token; joules of computing, memory, links and the user's
    terminal, but not of holding KV before (``held_w``).
    """

    way: str
    ttft_s: float
    joules: float


def held_w(tokens: int, kv_bytes_per_token: int) -> float:
    """Watts that satellites' memory takes to hold the KV of a prompt."""
    return tokens * kv_bytes_per_token * STANDBY_W_PER_BYTE


@dataclass(frozen=True)
class Places:
    """``ground`` and ``board``: the loads of a host on the ground and of one on board. ``beam_s``: light time between
    the host on the ground and its satellite. ``hops``: mean links between satellites from host to server, of each.
    """

    ground: BreakEven
    board: BreakEven
    rates: LinkRates
    beam_s: float
    ground_hops: float
    board_hops: float

    def on_ground(self, tokens: int, machine: Machine, kv_bytes_per_token: int) -> Answer:
        moved = self.ground_hops + 1.0
        found = self._answer(self.ground, self.rates.down_bit_s, tokens, machine, kv_bytes_per_token, moved)
        terminal_s = 0.0 if found.way == "compute" else found.ttft_s
        return replace(found, joules=found.joules + terminal_s * TERMINAL_W)

    def on_board(self, tokens: int, machine: Machine, kv_bytes_per_token: int) -> Answer:
        found = self._answer(self.board, self.rates.isl_bit_s, tokens, machine, kv_bytes_per_token, self.board_hops)
        up_s = 8 * TOKEN_BYTES * tokens / (self.rates.up_bit_s or math.inf)
        down_s = 8 * TOKEN_BYTES / (self.rates.down_bit_s or math.inf)
        beam_j = TOKEN_BYTES * (tokens + 1) * LINK_J_PER_BYTE
        ttft_s = 2 * self.beam_s + up_s + found.ttft_s + down_s
        return Answer(found.way, ttft_s, found.joules + beam_j + ttft_s * TERMINAL_W)

    def _answer(
        self, even: BreakEven, rate: float | None, tokens: int, machine: Machine, kv_bytes: int, links: float
    ) -> Answer:
        cell = even.cell(tokens, machine.tokens_per_s, rate or 1e15, kv_bytes)
        seconds = {"compute": cell.compute_s, "load": cell.load_s, "both": cell.both_s}[cell.best]
        # Of both at once, what is computed takes as long as the whole does.
        computed_s = {"compute": seconds, "load": 0.0, "both": seconds}[cell.best]
        loaded = 1.0 - computed_s / cell.compute_s
        moved_j = loaded * tokens * kv_bytes * (2 * READ_J_PER_BYTE + links * LINK_J_PER_BYTE)
        return Answer(cell.best, seconds, computed_s * machine.watts + moved_j)
