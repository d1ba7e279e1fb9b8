"""Cake's algorithm ("Compute or load KV cache? Why not both?", sections 4.2, A and B), as a scheduler without I/O.

The caller reports events, then asks ``poll`` what to do. The paper's steps:

1. Split the prompt into chunks (A.1): ``cut_prompt``.
2. Two pointers (A.2): ``_compute_ptr``, the first missing chunk; ``_io_ptr``, the last not requested.
3. ``push_seq`` (B.2, 2) takes the chunks and lists the fetches, last chunk first.
4. Load backwards (A.5): ``_next_fetch``.
5. Compute forwards (A.4): ``_next_step``, as a token needs all tokens before it. ``is_resident`` (B.2, 4) shows what
   was loaded.
6. Finished when the pointers have met and every chunk is resident (A.6): ``done``.

Extensions: a step may span small chunks; a chunk goes to the side expected to have it sooner; a late load is waited for
no longer than computing takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from skymemory.cache.blocks import LoaderResult
from skymemory.cache.cake.pace import SpeedEstimate
from skymemory.errors import InvalidInput
from skymemory.pacing import ByteBudget

_ALMOST = 1 - 1e-9  # of a wait: rounding must not wake the caller twice for one decision


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens computed or loaded together."""

    first_token: int
    tokens: int
    size_bytes: int = 0
    loadable: bool = False  # all its blocks are stored
    resident: bool = False  # in the engine before


def cut_prompt(
    prompt_tokens: int,
    *,
    step_tokens: int,
    block_tokens: int,
    stored_blocks: Sequence[int | None],
    resident_tokens: int = 0,
) -> tuple[PromptChunk, ...]:
    """Return the chunks, in order, covering every token once.

    ``stored_blocks``: bytes of each full block, None if not stored. A chunk ends after ``step_tokens``, at the end of
    the resident prefix, and between stored and missing blocks.
    """
    if prompt_tokens < 1 or step_tokens < 1 or block_tokens < 1 or step_tokens % block_tokens:
        raise InvalidInput(
            f"a prompt of {prompt_tokens} tokens, steps of {step_tokens}, blocks of {block_tokens}: "
            "all must be positive, and a step a whole number of blocks"
        )
    if not 0 <= resident_tokens <= prompt_tokens or resident_tokens % block_tokens:
        raise InvalidInput(f"resident_tokens is {resident_tokens}: not whole blocks of {block_tokens} in the prompt")

    def block_bytes(token: int) -> int | None:
        block = token // block_tokens
        is_full = (block + 1) * block_tokens <= prompt_tokens
        return stored_blocks[block] if is_full and block < len(stored_blocks) else None

    chunks: list[PromptChunk] = []
    first = 0
    if resident_tokens:
        chunks.append(PromptChunk(0, resident_tokens, resident=True))
        first = resident_tokens
    while first < prompt_tokens:
        limit = min((first // step_tokens + 1) * step_tokens, prompt_tokens)
        size = block_bytes(first)
        loadable, total, end = size is not None, size or 0, min(first + block_tokens, limit)
        while end < limit and ((size := block_bytes(end)) is not None) == loadable:
            total += size or 0
            end = min(end + block_tokens, limit)
        chunks.append(PromptChunk(first, end - first, total, loadable))
        first = end
    return tuple(chunks)


class Origin(Enum):
    RESIDENT = "resident"
    COMPUTED = "computed"
    LOADED = "loaded"


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Tokens to prefill now; then report ``chunk_computed``."""

    index: int
    first_token: int
    tokens: int
    chunks: int = 1  # from ``index`` on, the last perhaps in part

    @property
    def indices(self) -> range:
        return range(self.index, self.index + self.chunks)


@dataclass(frozen=True, slots=True)
class Actions:
    """Actions to take now; fetches are served in order."""

    compute: ComputeStep | None = None
    fetch: tuple[int, ...] = ()  # chunks to load
    cancel: tuple[int, ...] = ()  # loads no longer needed
    wake_s: float | None = None  # time of the next ``poll`` without an event


class BidirectionalLoader:
    """Scheduler of a prompt."""

    def __init__(
        self,
        *,
        max_in_flight_bytes: int,
        budget_tokens: int,
        pace: SpeedEstimate | None = None,
        computes: bool = True,
        loads: bool = True,
        others_fill: bool | None = None,
    ) -> None:
        """``budget_tokens``: tokens of each step. ``others_fill``: True if other requests fill its remainder."""
        if max_in_flight_bytes < 1 or budget_tokens < 0:
            raise InvalidInput("max_in_flight_bytes must be positive, budget_tokens not negative")
        self._budget_tokens = budget_tokens
        self._pace = pace or SpeedEstimate()
        if others_fill is not None:
            self._pace.assume_batch(others_fill)
        self._link = FetchQueue(self._pace, max_in_flight_bytes)
        self._computes, self._loads = computes, loads
        self._chunks: tuple[PromptChunk, ...] = ()
        self._work = PromptWork((), loads)
        self._origin: list[Origin | None] = []  # by chunk; None: not in place
        self._loadable: list[bool] = []
        self._computed_tokens: list[int] = []
        self._step: ComputeStep | None = None
        self._step_budget = 0
        self._step_since_s = 0.0
        self._compute_ptr = 0  # first missing chunk
        self._io_ptr = -1  # last chunk not requested
        self._cancelled: list[int] = []
        self._wasted_bytes = self._wasted_tokens = self._failed_loads = 0
        self._met_at: int | None = None  # last chunk put in place
        self._start_s = self._end_s = 0.0
        self._aborted = False

    # --- events ---

    def push_seq(self, chunks: Sequence[PromptChunk], now_s: float) -> tuple[tuple[int, int], ...]:
        """Take the prompt; returns (index, bytes) of the loadable chunks in order of fetching."""
        if self._chunks or not chunks:
            raise InvalidInput("a loader takes one prompt, of at least one chunk")
        expected = chunks[0].first_token
        for chunk in chunks:
            if chunk.first_token != expected or chunk.tokens < 1 or chunk.size_bytes < 0:
                raise InvalidInput(f"chunks must follow each other and hold tokens: {chunk}")
            expected += chunk.tokens
        self._chunks = tuple(chunks)
        self._work = PromptWork(chunks, self._loads)
        self._origin = [Origin.RESIDENT if chunk.resident else None for chunk in chunks]
        self._loadable = [chunk.loadable and self._loads and not chunk.resident for chunk in chunks]
        self._computed_tokens = [0] * len(chunks)
        self._io_ptr = len(chunks) - 1
        self._start_s = self._end_s = now_s
        self._advance()
        return tuple((i, chunks[i].size_bytes) for i in reversed(range(len(chunks))) if self._loadable[i])

    def chunk_computed(self, now_s: float) -> None:
        """Record the end of the step: its complete chunks are in place, those loaded meanwhile were wasted."""
        step = self._step
        if step is None:
            raise InvalidInput("no step is under way")
        self._step = None
        self._pace.step_took(
            step.first_token + step.tokens / 2, now_s - self._step_since_s, step.tokens / self._step_budget
        )
        self._end_s = now_s
        index, remaining = step.index, step.tokens
        while remaining:
            tokens = min(remaining, self._chunks[index].tokens - self._computed_tokens[index])
            remaining -= tokens
            if self._origin[index] is not None:
                self._wasted_tokens += tokens + self._computed_tokens[index]
                self._computed_tokens[index] = 0
            elif not self._aborted:
                self._computed_tokens[index] += tokens
                if self._computed_tokens[index] == self._chunks[index].tokens:
                    self._drop_fetch(index, now_s)
                    self._settle(index, Origin.COMPUTED)
            index += 1

    def step_dropped(self) -> None:
        """Drop the step: its chunk was loaded, or the engine stops."""
        step, self._step = self._step, None
        if step is not None and self._origin[step.index] is not None:
            self._wasted_tokens += self._computed_tokens[step.index]

    def chunk_loaded(self, index: int, now_s: float) -> None:
        """Record that a chunk is in place; ignored if not requested."""
        if index not in self._link:
            return
        self._link.on_fetched(index, now_s)
        self._end_s = max(self._end_s, now_s)
        if self._computed_tokens[index] and (self._step is None or self._step.index != index):
            self._wasted_tokens += self._computed_tokens[index]  # part of it, in a step that ended within the chunk
        self._settle(index, Origin.LOADED)

    def load_failed(self, index: int, now_s: float) -> None:
        if index not in self._link:
            return
        self._wasted_bytes += self._link.failed(index, now_s)
        self._loadable[index] = False
        self._failed_loads += 1

    def budget_changed(self, budget_tokens: int) -> None:
        """Set the tokens of each step; 0 pauses computing, not loading."""
        if budget_tokens < 0:
            raise InvalidInput(f"budget_tokens is {budget_tokens}: negative")
        self._budget_tokens = budget_tokens

    def abort(self, now_s: float) -> None:
        """Cancel the request; the next ``poll`` cancels fetches."""
        if self.done:
            return
        self._aborted = True
        self._end_s = now_s
        for index in self._link.indices():
            self._drop_fetch(index, now_s)

    # --- state and decisions ---

    def is_resident(self, index: int) -> bool:
        return self._origin[index] is not None

    def origin(self, index: int) -> str:
        origin = self._origin[index]
        return origin.value if origin else ""

    def link_takes_s(self, index: int) -> float | None:
        rate = self._pace.bytes_per_s
        return None if rate is None else self._chunks[index].size_bytes / rate

    @property
    def done(self) -> bool:
        """True if no step runs, and every chunk is resident or the request aborted."""
        return self._step is None and (self._aborted or self._compute_ptr == len(self._chunks))

    def poll(self, now_s: float) -> Actions:
        """Return what to do now; call it after every event and at ``wake_s``."""
        fetch: list[int] = []
        compute: ComputeStep | None = None
        wake_s: float | None = None
        if not self._aborted:
            while (index := self._next_fetch(now_s)) is not None:
                self._link.ask(index, self._chunks[index].size_bytes, now_s)
                self._io_ptr = index - 1
                fetch.append(index)
            if self._step is None:
                compute, wake_s = self._next_step(now_s)
        cancel, self._cancelled = tuple(self._cancelled), []
        return Actions(compute, tuple(fetch), cancel, wake_s)

    def result(self) -> LoaderResult:
        pairs = list(zip(self._chunks, self._origin, strict=True))
        resident, computed, loaded = (sum(c.tokens for c, o in pairs if o is origin) for origin in Origin)
        met = self._met_at if computed and loaded and self._compute_ptr == len(self._chunks) else None
        return LoaderResult(
            resident_tokens=resident,
            computed_tokens=computed,
            loaded_tokens=loaded,
            loaded_bytes=sum(c.size_bytes for c, o in pairs if o is Origin.LOADED),
            met_at_token=None if met is None else self._chunks[met].first_token,
            wasted_bytes=self._wasted_bytes,
            wasted_tokens=self._wasted_tokens,
            failed_loads=self._failed_loads,
            seconds=self._end_s - self._start_s,
            aborted=self._aborted,
        )

    def _next_fetch(self, now_s: float) -> int | None:
        """Return the next chunk to load, from the end; None without room, or if computed sooner."""
        index = self._io_ptr
        while index >= self._compute_ptr and (self._origin[index] is not None or not self._loadable[index]):
            index -= 1
        self._io_ptr = index
        if index < self._compute_ptr or not self._link.has_room(self._chunks[index].size_bytes):
            return None
        load_s = self._link.idle_after_s(self._chunks[index].size_bytes, now_s)
        compute_s = self._compute_s(index) if self._computes and self._budget_tokens else None
        if load_s is None or compute_s is None:
            return index
        if self._step:
            compute_s -= now_s - self._step_since_s
        return index if compute_s > load_s else None

    def _next_step(self, now_s: float) -> tuple[ComputeStep | None, float | None]:
        """Return the next step; or, if loading should be sooner, the time to decide again."""
        at = self._compute_ptr
        if at == len(self._chunks) or not self._budget_tokens:
            return None, None
        if self._loadable[at]:
            if not self._computes:
                return None, None
            compute_s, load_s = self._compute_s(at), self._load_s(at, now_s)
            if compute_s is not None and load_s is not None and load_s < compute_s * _ALMOST:
                # A late load is expected to take as long again, so the wait ends at the cost of computing.
                head_s = self._link.head_s(now_s)
                return None, now_s + head_s + compute_s - (load_s - abs(head_s))
        first_token = self._chunks[at].first_token + self._computed_tokens[at]
        tokens, index = self._chunks[at].tokens - self._computed_tokens[at], at + 1
        while tokens < self._budget_tokens and index < len(self._chunks) and self._is_computed_with_step(index, now_s):
            tokens += self._chunks[index].tokens
            index += 1
        self._step = ComputeStep(at, first_token, min(tokens, self._budget_tokens), index - at)
        self._step_since_s = now_s
        self._step_budget = self._budget_tokens
        return self._step, None

    def _is_computed_with_step(self, index: int, now_s: float) -> bool:
        """Return True if the step, which has reached this chunk, should compute it too: loading is not sooner."""
        if self._origin[index] is not None:
            return False
        if not self._loadable[index]:
            return True
        if not self._computes:  # whatever can be loaded is only loaded
            return False
        compute_s, load_s = self._compute_s(index), self._load_s(index, now_s)
        if load_s is None and index in self._link:
            # Its load is under way, at an unknown rate, and may end any moment. Computing it now pays only if a step
            # of its own would cost half a full step or more, however few its tokens.
            return self._pace.part(0.0) >= 0.5
        return compute_s is None or load_s is None or load_s >= compute_s * _ALMOST

    def _load_s(self, index: int, now_s: float) -> float | None:
        if index > self._io_ptr:
            return self._link.here_after_s(index, now_s)
        return self._link.idle_after_s(self._work.bytes_between(index, self._io_ptr), now_s)

    def _compute_s(self, last: int) -> float | None:
        at = self._compute_ptr
        return self._work.compute_s(at, self._computed_tokens[at], last, self._pace, self._budget_tokens)

    def _settle(self, index: int, origin: Origin) -> None:
        self._origin[index] = origin
        self._met_at = index
        self._advance()

    def _advance(self) -> None:
        while self._compute_ptr < len(self._chunks) and self._origin[self._compute_ptr] is not None:
            self._compute_ptr += 1

    def _drop_fetch(self, index: int, now_s: float) -> None:
        if index in self._link:
            self._wasted_bytes += self._link.cancel(index, now_s)
            self._cancelled.append(index)


# --- estimates of compute and load times ---


class PromptWork:
    """Compute time and bytes of any run of chunks, from prefix sums."""

    def __init__(self, chunks: Sequence[PromptChunk], loads: bool) -> None:
        missing = [0 if chunk.resident else chunk.tokens for chunk in chunks]
        self._first = [chunk.first_token for chunk in chunks]
        self._tokens = [0, *accumulate(missing)]
        self._moment = [  # sums of tokens times position
            0.0,
            *accumulate(n * (c.first_token + c.tokens / 2) for n, c in zip(missing, chunks, strict=True)),
        ]
        wanted = [chunk.size_bytes if loads and chunk.loadable and not chunk.resident else 0 for chunk in chunks]
        self._bytes = [0, *accumulate(wanted)]

    def bytes_between(self, first: int, last: int) -> int:
        return self._bytes[last + 1] - self._bytes[first] if last >= first else 0

    def compute_s(self, first: int, computed: int, last: int, pace: SpeedEstimate, budget_tokens: int) -> float | None:
        """Estimate the seconds to compute chunks ``first`` to ``last``, less ``computed`` tokens."""
        line = pace.line()
        if line is None:
            return None
        at_zero_s, slope = line
        tokens = self._tokens[last + 1] - self._tokens[first] - computed
        moment = self._moment[last + 1] - self._moment[first] - computed * (self._first[first] + computed / 2)
        seconds = (at_zero_s * tokens + slope * moment) / budget_tokens
        if over := tokens % budget_tokens:
            # The last step is not full, and costs more than its share.
            filled = over / budget_tokens
            seconds += (pace.part(filled) - filled) * (at_zero_s + slope * self._first[last])
        return max(seconds, 0.0)


class FetchQueue:
    """Requested fetches, served in order; a single fetch may exceed ``max_bytes``."""

    def __init__(self, pace: SpeedEstimate, max_bytes: int) -> None:
        self._pace = pace
        self._sizes: dict[int, int] = {}
        self._bytes = ByteBudget(max_bytes)
        self._head_since_s = 0.0
        self._from_idle: int | None = None  # the fetch that found the link idle

    def __contains__(self, index: int) -> bool:
        return index in self._sizes

    def indices(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def has_room(self, size_bytes: int) -> bool:
        return self._bytes.has_room(size_bytes)

    def ask(self, index: int, size_bytes: int, now_s: float) -> None:
        if not self._sizes:
            self._head_since_s = now_s
            self._from_idle = index
        self._sizes[index] = size_bytes
        self._bytes.change(size_bytes)

    def on_fetched(self, index: int, now_s: float) -> None:
        from_idle = index == self._from_idle
        self._pace.load_took(self._drop(index), now_s - self._head_since_s, from_idle=from_idle)
        self._head_since_s = now_s

    def failed(self, index: int, now_s: float) -> int:
        if index == self._head():
            self._pace.load_took(0, now_s - self._head_since_s)
        return self.cancel(index, now_s)

    def cancel(self, index: int, now_s: float) -> int:
        if index == self._head():
            self._head_since_s = now_s  # else the oldest stays as late as before
        return self._drop(index)

    def head_s(self, now_s: float) -> float:
        """Return the seconds until the oldest fetch is expected; negative if late."""
        rate = self._pace.bytes_per_s
        if rate is None or not self._sizes:
            return 0.0
        latency_s = self._pace.latency_s if self._head() == self._from_idle else 0.0
        return self._head_since_s + latency_s + self._head_bytes() / rate - now_s

    def idle_after_s(self, more_bytes: int, now_s: float) -> float | None:
        """Return the seconds until all requests and ``more_bytes`` are loaded; a late fetch takes as long again."""
        rate = self._pace.bytes_per_s
        if rate is None:
            return None
        asked_s = abs(self.head_s(now_s)) + (self._bytes.used_bytes - self._head_bytes()) / rate
        return max(asked_s, self._pace.latency_s) + more_bytes / rate if more_bytes else asked_s

    def here_after_s(self, index: int, now_s: float) -> float | None:
        """Return the seconds until a requested chunk is loaded."""
        rate = self._pace.bytes_per_s
        if rate is None:
            return None
        ahead = 0
        for requested, size in self._sizes.items():
            ahead += size
            if requested == index:
                break
        return abs(self.head_s(now_s)) + (ahead - self._head_bytes()) / rate

    def _head(self) -> int | None:
        return next(iter(self._sizes), None)

    def _head_bytes(self) -> int:
        return next(iter(self._sizes.values()), 0)

    def _drop(self, index: int) -> int:
        size = self._sizes.pop(index)
        self._bytes.change(-size)
        return size
