"""The loader in virtual time: the very scheduler of ``cache.cake.scheduler`` over a simulated GPU and link.

Also the best split in hindsight, by trying them all, to say how far from it the loader stays.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from skymemory.cache.cake.pace import Pace
from skymemory.cache.cake.scheduler import BidirectionalLoader, ComputeStep, PromptChunk
from skymemory.cache.results import LoaderResult
from skymemory.constellation.orbit import Shell
from skymemory.constellation.presets import EPOCH_UNIX_S
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import DEFAULT_MASK_DEG, GroundHost, elevations_deg, gateway, slants_m
from skymemory.errors import InvalidInput
from skymemory.units import SPEED_OF_LIGHT_M_S

StepSeconds = Callable[[int, int], float]
"""Seconds of one prefill step: (first token, our tokens in it)."""


@dataclass(frozen=True, slots=True)
class LinkTrace:
    """A link whose rate changes at given times; the last rate lasts. A rate of 0 is an outage."""

    since_s: tuple[float, ...]
    """Ascending, beginning with 0."""
    bytes_per_s: tuple[float, ...]
    latency_s: float = 0.0
    """From asking to the first byte; of fetches asked for behind one another only the first one's counts."""

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
            raise InvalidInput("a trace begins at 0, ascends, has a rate for each time, and does not end in an outage")

    @classmethod
    def constant(cls, bytes_per_s: float, latency_s: float = 0.0) -> LinkTrace:
        return cls((0.0,), (bytes_per_s,), latency_s)

    def finish_s(self, start_s: float, size_bytes: float) -> float:
        """When ``size_bytes`` whose first byte comes at ``start_s`` are through."""
        at = bisect_right(self.since_s, start_s) - 1
        now_s, left = start_s, float(size_bytes)
        while at + 1 < len(self.since_s):
            room = (self.since_s[at + 1] - now_s) * self.bytes_per_s[at]
            if self.bytes_per_s[at] and room >= left:
                break
            left -= room
            at += 1
            now_s = self.since_s[at]
        return now_s + left / self.bytes_per_s[at]


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """One prompt, loaded in virtual time."""

    ttft_s: float
    """Until every chunk is there and no step is under way."""
    result: LoaderResult
    origins: tuple[str, ...]
    """Of each chunk: where it came from, or "" after an abort."""
    scheduling_s: tuple[float, ...] = ()
    """What the scheduler really took from one step's begin to the next one's, where a ``timer`` was given."""


def simulate_load(
    chunks: Sequence[PromptChunk],
    step_s: StepSeconds,
    trace: LinkTrace,
    *,
    budget_tokens: int,
    max_in_flight_bytes: int,
    pace: Pace | None = None,
    computes: bool = True,
    loads: bool = True,
    others_fill: bool | None = None,
    failing: Collection[int] = (),
    budgets: Mapping[float, int] | None = None,
    abort_at_s: float | None = None,
    timer: Callable[[], float] | None = None,
) -> SimulatedLoad:
    """Run the loader from second 0 until it is done.

    Chunks in ``failing`` take their time on the link and fail then; ``budgets`` maps seconds to a new budget.
    ``timer``, for example ``time.perf_counter``, tells what the scheduler itself costs on this computer.
    Raises InvalidInput where the prompt can never be done, for example with a budget that stays 0.
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
    events: list[tuple[float, int, str, int]] = []
    asked = 0

    def post(at_s: float, what: str, value: int) -> None:
        nonlocal asked
        asked += 1
        heapq.heappush(events, (at_s, asked, what, value))

    for at_s, tokens in (budgets or {}).items():
        post(at_s, "budget", tokens)
    if abort_at_s is not None:
        post(abort_at_s, "abort", 0)
    now_s = link_free_s = 0.0
    on_link: list[int] = []
    asked_s: dict[int, float] = {}
    sending: int | None = None
    spent_s = 0.0
    scheduling_s: list[float] = []
    while not loader.done:
        began_s = timer() if timer else 0.0
        actions = loader.poll(now_s)
        if timer:
            spent_s += timer() - began_s
        on_link.extend(actions.fetch)
        asked_s.update((index, now_s) for index in actions.fetch)
        for index in actions.cancel:
            if index in on_link:
                on_link.remove(index)
        if sending is None and on_link:
            sending = on_link.pop(0)
            first_byte_s = max(now_s, asked_s[sending] + trace.latency_s)
            link_free_s = trace.finish_s(first_byte_s, chunks[sending].size_bytes)
            post(link_free_s, "link", sending)
        step: ComputeStep | None = actions.compute
        if step is not None:
            post(now_s + step_s(step.first_token, step.tokens), "computed", step.index)
            if timer:
                scheduling_s.append(spent_s)
                spent_s = 0.0
        if actions.wake_s is not None:
            post(max(actions.wake_s, now_s), "wake", 0)
        if loader.done:
            break
        if not events:
            raise InvalidInput("nothing can go on: a budget of 0 and nothing to load")
        now_s, _, what, value = heapq.heappop(events)
        began_s = timer() if timer else 0.0
        if what == "computed":
            loader.chunk_computed(now_s)
        elif what == "link":
            sending = None
            (loader.load_failed if value in failing else loader.chunk_loaded)(value, now_s)
        elif what == "budget":
            loader.budget_changed(value)
        elif what == "abort":
            loader.abort(now_s)
        if timer:
            spent_s += timer() - began_s
    origins = tuple(loader.origin(i) for i in range(len(chunks)))
    return SimulatedLoad(now_s, loader.result(), origins, tuple(scheduling_s))


def best_split_s(chunks: Sequence[PromptChunk], step_s: StepSeconds, trace: LinkTrace, *, budget_tokens: int) -> float:
    """TTFT of the best split in hindsight: compute the first k chunks, load the rest from the back; all k tried.

    Steps are as full as they can be, over the borders of chunks. For chunks that can all be loaded; raises InvalidInput
    otherwise.
    """
    if not budget_tokens or any(not chunk.loadable or chunk.resident for chunk in chunks):
        raise InvalidInput("hindsight is worked out for chunks that can all be loaded, and a budget")
    computed_s = [0.0]
    full_s, at = 0.0, chunks[0].first_token  # full steps so far, and where they end
    for chunk in chunks:
        end = chunk.first_token + chunk.tokens
        while end - at >= budget_tokens:
            full_s += step_s(at, budget_tokens)
            at += budget_tokens
        computed_s.append(full_s + (step_s(at, end - at) if end > at else 0.0))
    best_s, tail_bytes = computed_s[-1], 0
    for k in reversed(range(len(chunks))):
        tail_bytes += chunks[k].size_bytes
        best_s = min(best_s, max(computed_s[k], trace.finish_s(trace.latency_s, tail_bytes)))
    return best_s


# How long a GPU that we do not have takes for a prefill step, from what the Cake paper says of its two.
#
# A step over tokens ``a .. b`` of a prompt takes ``batch_s + token_s · (b − a) + pair_s · (b² − a²)``: weights, then
# attention to all that stands before. So the time of a chunk grows linearly with its index (the paper's figure 3) and
# that of a prompt with its square (its finding 2).
#
# The paper prints no times, only what Cake saves; they determine the model. Cake's time T over a link of known rate is
# known from what it saves against loading alone, so are the tokens x that were not loaded in T, hence T(x); what it
# saves
# against computing alone then gives T(all). Two equations, two coefficients, for each GPU. A part of the GPU needs its
# own: other requests fill the batch up to its 512 tokens, so a step costs the same whatever is ours of it.


PAPER_TOKEN_BYTES = 2**19
"""KV of one token of LongAlpaca-7B in 16 bit: 2 · 32 layers · 4096 · 2 bytes, "0.5MB" in the paper's section 5.1."""
PAPER_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Seconds of prefill steps: per step, per token of ours in it, and per pair of a token and one before it (halved).

    ``step_s`` has the form that the simulated loader wants.
    """

    name: str
    token_s: float
    pair_s: float
    batch_s: float = 0.0

    def step_s(self, first_token: int, tokens: int) -> float:
        """Seconds of one step over ``tokens`` tokens from ``first_token`` on."""
        return self.batch_s + self.token_s * tokens + self.pair_s * tokens * (2 * first_token + tokens)

    def prompt_s(self, tokens: int, budget_tokens: int = PAPER_STEP_TOKENS) -> float:
        """Seconds of a whole prompt in steps of ``budget_tokens``: computing alone."""
        return -(-tokens // budget_tokens) * self.batch_s + self.token_s * tokens + self.pair_s * tokens * tokens

    def for_larger_model(self, name: str, weights_ratio: float, attention_ratio: float) -> PrefillModel:
        """The same GPU with a model of so many times the weights, and layers × width."""
        return replace(
            self,
            name=name,
            token_s=self.token_s * weights_ratio,
            batch_s=self.batch_s * weights_ratio,
            pair_s=self.pair_s * attention_ratio,
        )


def fit_whole_gpu(name: str, saved_of_compute: float, saved_of_load: float) -> PrefillModel:
    """The model under which Cake saves these parts of computing and of loading alone: 32k tokens at 10000 Mbit/s.

    Section 5.2 of the paper: 31.5 % and 76.9 % on the A100, 26.7 % and 80.2 % on the H100.
    Raises InvalidInput for parts that no growing line fits.
    """
    tokens, tokens_per_s = 32_768, 10e9 / 8 / PAPER_TOKEN_BYTES
    cake_s = (1 - saved_of_load) * tokens / tokens_per_s
    computed = tokens - cake_s * tokens_per_s
    alone_s = cake_s / (1 - saved_of_compute)
    pair_s = (alone_s / tokens - cake_s / computed) / (tokens - computed)
    token_s = alone_s / tokens - pair_s * tokens
    if pair_s < 0 or token_s < 0:
        raise InvalidInput(f"{name}: no step that grows along the prompt saves {saved_of_compute:.1%} of computing")
    return PrefillModel(name, token_s, pair_s)


def fit_shared_gpu(name: str, ratio: float, added_s: float) -> PrefillModel:
    """The model under which 14k tokens with 10 % of each batch take ``ratio`` times, and ``added_s`` more than, 90 %.

    Section 5.3 of the paper: 8.22 times and 14.34 s on the A100.
    """
    tokens = 14_336
    few, many = (math.ceil(tokens / share_tokens(share)) for share in (0.9, 0.1))
    batch_s = added_s / (many - few)
    pair_s = (added_s / (ratio - 1) - few * batch_s) / tokens**2
    if pair_s < 0:
        raise InvalidInput(f"{name}: steps of equal length alone take more than {ratio:g} times as long")
    return PrefillModel(name, 0.0, pair_s, batch_s)


def share_tokens(share: float) -> int:
    """Tokens of a 512-token batch that a request with this share of the GPU gets."""
    return max(1, int(PAPER_STEP_TOKENS * share + 1e-9))


A100 = fit_whole_gpu("A100", 0.315, 0.769)
H100 = fit_whole_gpu("H100", 0.267, 0.802)
A100_SHARED = fit_shared_gpu("A100, shared", 8.22, 14.34)
H100_SHARED = replace(A100_SHARED, name="H100, shared", batch_s=A100_SHARED.batch_s * H100.token_s / A100.token_s)
"""Not of the paper, which shares the A100 only: its batch, faster by as much as the whole GPU is."""
_SHARED = {A100: A100_SHARED, H100: H100_SHARED}


def with_share(gpu: PrefillModel, share: float) -> PrefillModel:
    """``gpu``, one of the paper's two, alone (share 1) or with others in its batches."""
    return gpu if share >= 1 else _SHARED[gpu]


# Links for the simulated loader: rates drawn at random, and the beam of a satellite that flies past.
#
# The beam: distances are those of the constellation's own orbits; the rate is Shannon's for the signal that is left
# after
# free space, in clear sky and with the whole channel for one user, so a bound and not a forecast. Where its figures
# come
# from stands at each.


REASSIGN_S = 15.0
"""Terminals of Starlink get their satellite anew every 15 s (Tanveer et al., "Making Sense of Constellations", CoNEXT
2023, and measurements since)."""
HANDOVER_S = 0.1
"""Our assumption of how long a beam is dark while the antenna turns to the next satellite; no source."""
_BOLTZMANN_DB = -228.6


def random_trace(
    seed: int, mean_bytes_per_s: float, *, spread: float = 0.5, every_s: float = 0.5, duration_s: float = 120.0
) -> LinkTrace:
    """A rate drawn anew ``every_s``, evenly from ``mean · (1 ± spread)``; after ``duration_s`` the mean."""
    if not 0 <= spread < 1 or mean_bytes_per_s <= 0 or every_s <= 0:
        raise InvalidInput(f"mean {mean_bytes_per_s:g}, spread {spread:g}, every {every_s:g} s: not a random link")
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
    """39.7 dBi against 150 K of sky and a receiver of 1.2 dB: 39.7 − 10·log10(150 + 92) = 15.9."""
    channels: int = 1
    """Channels side by side for this one user; more than one is our assumption, to have faster links."""

    def bytes_per_s(self, slant_m: float) -> float:
        """Shannon's bound at this distance."""
        path_db = 20 * math.log10(4 * math.pi * slant_m * self.frequency_hz / SPEED_OF_LIGHT_M_S)
        snr_db = self.eirp_dbw_per_mhz - 60 + self.g_over_t_db - path_db - _BOLTZMANN_DB
        return self.channels * self.channel_hz * math.log2(1 + 10 ** (snr_db / 10)) / 8


def leo_trace(
    shell: Shell,
    host: GroundHost,
    start_s: float,
    duration_s: float,
    *,
    budget: LinkBudget | None = None,
    sample_s: float = 1.0,
    mask_deg: float = DEFAULT_MASK_DEG,
    epoch_unix_s: float = EPOCH_UNIX_S,
    handover_s: float = HANDOVER_S,
) -> LinkTrace:
    """The beam to the highest satellite, chosen anew at every multiple of 15 s; dark while it is handed over.

    A satellite that sinks below the mask, or none in sight, is dark until the next choice. ``start_s`` is since the
    epoch; the trace's own time begins at 0 there. Its latency is light's way up and down at the start. Raises
    InvalidInput where no satellite is in sight at the end.
    """
    budget = budget or LinkBudget()
    end_s = start_s + duration_s
    choices = range(math.ceil(start_s / REASSIGN_S), math.ceil(end_s / REASSIGN_S))
    samples = {start_s + sample_s * i for i in range(math.ceil(duration_s / sample_s))}
    times = sorted(samples | {REASSIGN_S * k for k in choices})
    since_s: list[float] = []
    rates: list[float] = []
    serving: SatelliteId | None = None
    chosen_in: int | None = None
    for now_s in times:
        slot = math.floor(now_s / REASSIGN_S + 1e-9)
        if slot != chosen_in:
            before, serving = serving, gateway(shell, host, epoch_unix_s, now_s, mask_deg)
            if chosen_in is not None and serving != before and handover_s:
                since_s.append(now_s - start_s)
                rates.append(0.0)
                now_s += handover_s
            chosen_in = slot
        rate = 0.0
        if serving is not None and elevations_deg(shell, host, epoch_unix_s, now_s)[serving] >= mask_deg:
            rate = budget.bytes_per_s(float(slants_m(shell, host, epoch_unix_s, now_s)[serving]))
        if since_s and now_s - start_s <= since_s[-1]:
            continue  # a sample within the handover
        since_s.append(now_s - start_s)
        rates.append(rate)
    first = gateway(shell, host, epoch_unix_s, start_s, mask_deg)
    slant_m = float(slants_m(shell, host, epoch_unix_s, start_s)[first]) if first is not None else 0.0
    return LinkTrace(tuple(since_s), tuple(rates), 2 * slant_m / SPEED_OF_LIGHT_M_S)
