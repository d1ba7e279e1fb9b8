"""Simulated KV loading: the production scheduler over a modelled GPU and link."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from skymemory.cache.blocks import LoaderResult
from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.cache.cake.scheduler import BidirectionalLoader, ComputeStep, PromptChunk
from skymemory.constellation.orbit import Shell
from skymemory.constellation.presets import EPOCH_UNIX_S
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, GroundHost, elevations_deg, gateway, slants_m
from skymemory.errors import InvalidInput
from skymemory.units import SPEED_OF_LIGHT_M_S
from skymemory_lab.sim.clock import Clock, Event

StepSeconds = Callable[[int, int], float]
"""Seconds of a prefill step, given its first token and its number of tokens."""


@dataclass(frozen=True, slots=True)
class LinkTrace:
    """A link with a piecewise constant rate. The last rate lasts; 0 is an outage."""

    since_s: tuple[float, ...]
    """Ascending start times of the rates, from 0."""
    bytes_per_s: tuple[float, ...]
    latency_s: float = 0.0
    """Time from a request to its first byte. Of queued fetches only the first waits for it."""

    def __post_init__(self) -> None:
        if (
            len(self.since_s) != len(self.bytes_per_s)
            or not self.since_s
            or self.since_s[0]
            or any(b <= a for a, b in zip(self.since_s, self.since_s[1:], strict=False))
            or min(self.bytes_per_s) < 0
            or self.bytes_per_s[-1] <= 0
            or self.latency_s < 0
        ):
            raise InvalidInput("link trace: expected ascending times from 0, a rate ≥ 0 for each, and a last rate > 0")

    @classmethod
    def constant(cls, bytes_per_s: float, latency_s: float = 0.0) -> LinkTrace:
        return cls((0.0,), (bytes_per_s,), latency_s)

    def finish_s(self, start_s: float, size_bytes: float) -> float:
        at = bisect_right(self.since_s, start_s) - 1
        now_s, remaining_bytes = start_s, float(size_bytes)
        while at + 1 < len(self.since_s):
            room = (self.since_s[at + 1] - now_s) * self.bytes_per_s[at]
            if self.bytes_per_s[at] and room >= remaining_bytes:
                break
            remaining_bytes -= room
            at += 1
            now_s = self.since_s[at]
        return now_s + remaining_bytes / self.bytes_per_s[at]


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    ttft_s: float
    result: LoaderResult
    origins: tuple[str, ...]  # of each chunk, such as "computed" and "loaded"
    scheduling_s: tuple[float, ...] = ()
    """Real time of the scheduler between step starts."""


def simulate_load(
    chunks: Sequence[PromptChunk],
    step_s: StepSeconds,
    trace: LinkTrace,
    *,
    budget_tokens: int,
    max_in_flight_bytes: int,
    pace: SpeedEstimate | None = None,
    computes: bool = True,
    loads: bool = True,
    others_fill: bool | None = None,
    failing: Collection[int] = (),
    budgets: Mapping[float, int] | None = None,
    timer: Callable[[], float] | None = None,
) -> SimulatedLoad:
    """Run the loader from second 0 until it is done.

    Chunks in ``failing`` fail after their transfer. ``budgets`` maps seconds to a new budget. ``timer``: clock that
    measures the scheduler's own time.

    Raises:
        InvalidInput: the prompt can never be done.
    """
    loader = BidirectionalLoader(
        max_in_flight_bytes=max_in_flight_bytes,
        budget_tokens=budget_tokens,
        pace=pace,
        computes=computes,
        loads=loads,
        others_fill=others_fill,
    )
    loader.push_seq(chunks, 0.0)
    clock = Clock()
    for at_s, tokens in (budgets or {}).items():
        clock.at(at_s, _budget_change(loader, tokens))
    link_free_s = 0.0
    on_link: list[int] = []
    asked_s: dict[int, float] = {}
    sending: int | None = None
    spent_s = 0.0
    scheduling_s: list[float] = []

    def transferred(now_s: float) -> None:
        nonlocal sending
        assert sending is not None
        index, sending = sending, None
        (loader.load_failed if index in failing else loader.chunk_loaded)(index, now_s)

    # In each turn the loader says what to fetch, cancel and compute now. The link carries one chunk at a time in the
    # order of the requests. Then the clock advances to the next event, which is the end of a transferred or computed
    # chunk.
    while not loader.done:
        now_s = clock.now_s
        started_s = timer() if timer else 0.0
        actions = loader.poll(now_s)
        if timer:
            spent_s += timer() - started_s
        on_link.extend(actions.fetch)
        asked_s.update((index, now_s) for index in actions.fetch)
        for index in actions.cancel:
            if index in on_link:
                on_link.remove(index)
        if sending is None and on_link:
            sending = on_link.pop(0)
            # The latency of a request that was queued during another transfer has passed already.
            first_byte_s = max(now_s, asked_s[sending] + trace.latency_s)
            link_free_s = trace.finish_s(first_byte_s, chunks[sending].size_bytes)
            clock.at(link_free_s, transferred)
        step: ComputeStep | None = actions.compute
        if step is not None:
            clock.at(now_s + step_s(step.first_token, step.tokens), loader.chunk_computed)
            if timer:
                scheduling_s.append(spent_s)
                spent_s = 0.0
        if actions.wake_s is not None:
            clock.at(actions.wake_s, lambda _: None)  # polls again
        if loader.done:
            break
        if clock.next_s == math.inf:
            raise InvalidInput("the load cannot make progress: a budget of 0 and nothing to load")
        started_s = timer() if timer else 0.0
        clock.step()
        if timer:
            spent_s += timer() - started_s
    origins = tuple(loader.origin(i) for i in range(len(chunks)))
    return SimulatedLoad(clock.now_s, loader.result(), origins, tuple(scheduling_s))


def _budget_change(loader: BidirectionalLoader, tokens: int) -> Event:
    return lambda _: loader.budget_changed(tokens)


def best_split_s(chunks: Sequence[PromptChunk], step_s: StepSeconds, trace: LinkTrace, *, budget_tokens: int) -> float:
    """Return the TTFT of the best split in hindsight: the first k chunks computed, the others loaded.

    Raises:
        InvalidInput: not all chunks can be loaded, or the budget is 0.
    """
    if not budget_tokens or any(not chunk.loadable or chunk.resident for chunk in chunks):
        raise InvalidInput("best split: expected a budget and chunks that can all be loaded")
    computed_s = [0.0]
    full_s, at = 0.0, chunks[0].first_token  # full steps so far, and their end
    for chunk in chunks:
        end = chunk.first_token + chunk.tokens
        while end - at >= budget_tokens:
            full_s += step_s(at, budget_tokens)
            at += budget_tokens
        computed_s.append(full_s + (step_s(at, end - at) if end > at else 0.0))
    # From the end: with each additional chunk to load, the loaded tail grows and the computed head shrinks.
    best_s, tail_bytes = computed_s[-1], 0
    for k in reversed(range(len(chunks))):
        tail_bytes += chunks[k].size_bytes
        best_s = min(best_s, max(computed_s[k], trace.finish_s(trace.latency_s, tail_bytes)))
    return best_s


PAPER_TOKEN_BYTES = 2**19
"""KV of a token of LongAlpaca-7B in 16 bit: 2 · 32 layers · 4096 · 2 bytes (Cake, section 5.1)."""
PAPER_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Prefill times of a GPU.

    A step over tokens ``a .. b`` takes ``batch_s + token_s · (b − a) + pair_s · (b² − a²)``: weights, then attention to
    earlier tokens (Cake, figure 3).

    A shared GPU needs its own fit: other requests fill the batch, so a step takes the same time at any share.
    """

    name: str
    token_s: float
    pair_s: float
    batch_s: float = 0.0

    def step_s(self, first_token: int, tokens: int) -> float:
        return self.batch_s + self.token_s * tokens + self.pair_s * tokens * (2 * first_token + tokens)

    def prompt_s(self, tokens: int, budget_tokens: int = PAPER_STEP_TOKENS) -> float:
        return -(-tokens // budget_tokens) * self.batch_s + self.token_s * tokens + self.pair_s * tokens * tokens

    def for_larger_model(self, name: str, weights_ratio: float, attention_ratio: float) -> PrefillModel:
        return replace(
            self,
            name=name,
            token_s=self.token_s * weights_ratio,
            batch_s=self.batch_s * weights_ratio,
            pair_s=self.pair_s * attention_ratio,
        )


def fit_whole_gpu(name: str, saved_of_compute: float, saved_of_load: float) -> PrefillModel:
    """Fit the model in which Cake saves these shares of computing and loading alone: 32k tokens at 10000 Mbit/s."""
    # T = (1 − saved_of_load) · all / rate. In T the link carried T · rate tokens, so the other x tokens were computed:
    # T(x) = T. And T(all) = T / (1 − saved_of_compute). With T(n) = token_s·n + pair_s·n² both coefficients follow.
    tokens, tokens_per_s = 32_768, 10e9 / 8 / PAPER_TOKEN_BYTES
    cake_s = (1 - saved_of_load) * tokens / tokens_per_s
    computed = tokens - cake_s * tokens_per_s
    alone_s = cake_s / (1 - saved_of_compute)
    pair_s = (alone_s / tokens - cake_s / computed) / (tokens - computed)
    token_s = alone_s / tokens - pair_s * tokens
    if pair_s < 0 or token_s < 0:
        raise InvalidInput(f"{name}: no model with growing steps saves {saved_of_compute:.1%} of computing")
    return PrefillModel(name, token_s, pair_s)


def fit_shared_gpu(name: str, ratio: float, added_s: float) -> PrefillModel:
    """Fit the model in which 14k tokens take ``ratio`` times as long, and ``added_s`` longer, with 10 % of each batch
    as with 90 % (Cake, section 5.3).
    """
    tokens = 14_336
    # T = steps · batch_s + pair_s · tokens². ``added_s`` comes from the difference in steps alone; the ratio gives
    # pair_s.
    few, many = (math.ceil(tokens / share_tokens(share)) for share in (0.9, 0.1))
    batch_s = added_s / (many - few)
    pair_s = (added_s / (ratio - 1) - few * batch_s) / tokens**2
    if pair_s < 0:
        raise InvalidInput(f"{name}: no model has a ratio of {ratio:g} with {added_s:g} s added")
    return PrefillModel(name, 0.0, pair_s, batch_s)


def share_tokens(share: float) -> int:
    """Return the tokens of a step that are ours."""
    return max(1, int(PAPER_STEP_TOKENS * share + 1e-9))


A100 = fit_whole_gpu("A100", 0.315, 0.769)
H100 = fit_whole_gpu("H100", 0.267, 0.802)
A100_SHARED = fit_shared_gpu("A100, shared", 8.22, 14.34)
H100_SHARED = replace(A100_SHARED, name="H100, shared", batch_s=A100_SHARED.batch_s * H100.token_s / A100.token_s)
"""Extrapolation: the paper shares only the A100."""
_SHARED = {A100: A100_SHARED, H100: H100_SHARED}


def with_share(gpu: PrefillModel, share: float) -> PrefillModel:
    return gpu if share >= 1 else _SHARED[gpu]


REASSIGN_S = 15.0
"""Interval at which Starlink reassigns terminals (Tanveer et al., CoNEXT 2023)."""
HANDOVER_S = 0.1
"""Outage while the antenna turns to the next satellite (an assumption)."""
_BOLTZMANN_DB = -228.6


def random_trace(
    seed: int, mean_bytes_per_s: float, *, spread: float = 0.5, every_s: float = 0.5, duration_s: float = 120.0
) -> LinkTrace:
    """Return a trace with rates drawn uniformly from ``mean · (1 ± spread)``; after ``duration_s`` the mean."""
    if not 0 <= spread < 1 or mean_bytes_per_s <= 0 or every_s <= 0:
        raise InvalidInput(
            f"random link: mean {mean_bytes_per_s:g}, spread {spread:g}, every {every_s:g} s; expected > 0, [0, 1), > 0"
        )
    draw = random.Random(seed)
    pieces = max(1, math.ceil(duration_s / every_s))
    rates = [mean_bytes_per_s * draw.uniform(1 - spread, 1 + spread) for _ in range(pieces)]
    return LinkTrace(tuple(every_s * i for i in range(pieces + 1)), (*rates, mean_bytes_per_s))


@dataclass(frozen=True, slots=True)
class LinkBudget:
    """A downlink in Ka band: 3GPP TR 38.821, tables 6.1.1.1-1 (LEO-600, set 1) and 6.1.1.1-3 (VSAT of 60 cm)."""

    frequency_hz: float = 20e9
    channel_hz: float = 400e6
    eirp_dbw_per_mhz: float = 4.0
    g_over_t_db: float = 15.9
    """Receiver quality: 39.7 dBi − 10·log10(150 K sky + 92 K receiver of 1.2 dB)."""
    channels: int = 1
    """Parallel channels for one user; above 1 is an assumption."""

    def bytes_per_s(self, slant_m: float) -> float:
        """Return the Shannon bound at this distance: clear sky, free space loss, one user."""
        path_db = 20 * math.log10(4 * math.pi * slant_m * self.frequency_hz / SPEED_OF_LIGHT_M_S)
        # −60: density is per MHz, and noise per Hz. The channel's width cancels out of signal to noise.
        snr_db = self.eirp_dbw_per_mhz - 60 + self.g_over_t_db - path_db - _BOLTZMANN_DB
        return self.channels * self.channel_hz * math.log2(1 + 10 ** (snr_db / 10)) / 8


def leo_trace(
    shell: Shell,
    host: GroundHost,
    start_s: float,
    duration_s: float,
    *,
    budget: LinkBudget | None = None,
) -> LinkTrace:
    """Return the link to the highest satellite, chosen at each multiple of 15 s, with an outage at each handover.

    Below the mask there is an outage until the next choice. ``start_s``, since the epoch, is time 0 of the trace. The
    latency is that of the start.

    Raises:
        InvalidInput: no satellite is in sight at the end.
    """
    budget = budget or LinkBudget()
    end_s = start_s + duration_s
    choices = range(math.ceil(start_s / REASSIGN_S), math.ceil(end_s / REASSIGN_S))
    samples = {start_s + i for i in range(math.ceil(duration_s))}
    times = sorted(samples | {REASSIGN_S * k for k in choices})
    since_s: list[float] = []
    rates: list[float] = []
    serving: SatelliteId | None = None
    chosen_in: int | None = None
    for now_s in times:
        slot = math.floor(now_s / REASSIGN_S + 1e-9)
        if slot != chosen_in:
            before, serving = serving, gateway(shell, host, EPOCH_UNIX_S, now_s, DEFAULT_MASK_DEG)
            if chosen_in is not None and serving != before:
                since_s.append(now_s - start_s)
                rates.append(0.0)
                now_s += HANDOVER_S
            chosen_in = slot
        rate = 0.0
        if serving is not None and elevations_deg(shell, host, EPOCH_UNIX_S, now_s)[serving] >= DEFAULT_MASK_DEG:
            rate = budget.bytes_per_s(float(slants_m(shell, host, EPOCH_UNIX_S, now_s)[serving]))
        if since_s and now_s - start_s <= since_s[-1]:
            continue  # a sample during the handover
        since_s.append(now_s - start_s)
        rates.append(rate)
    first = gateway(shell, host, EPOCH_UNIX_S, start_s, DEFAULT_MASK_DEG)
    slant_m = float(slants_m(shell, host, EPOCH_UNIX_S, start_s)[first]) if first is not None else 0.0
    return LinkTrace(tuple(since_s), tuple(rates), 2 * slant_m / SPEED_OF_LIGHT_M_S)
