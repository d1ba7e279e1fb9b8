"""The connector in a worker of vLLM: loads values into its blocks and saves blocks as values, beside its steps.

Each step, in this order: ``begin`` (its loads start), the forward, ``end`` (completed values are copied out; a thread
stores them), ``finished``, ``invalid_blocks`` and ``outcome`` (what has ended).

A load that waits for another engine (``waiting``) asks for its next values again and again until all have come, or for
too long none has.

A load that takes longer than computing its tokens is given up. Its thread may hang in the store, but writes no block
any more: ``_Job`` has a lock for that, since vLLM hands the blocks to another request then.

On an accelerator all of this runs ahead of the device (``copier``). What is said is true there as well: a load has
ended when its blocks are written, a value is stored when it is read, a step takes what the device takes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from skymemory.cache.blocks import TIER_FAILURES, BlockCache, LoadTally, PhaseClock
from skymemory.cache.patience import Latencies, patience_while_computing_s
from skymemory.cache.tiers.workers import Call, TierWorkers
from skymemory.engine.vllm.copier import BlockCopier, Mark, Now
from skymemory.engine.vllm.plan import Load, Loaded, Outcome, Plan, Save, Shape, rank_key
from skymemory.engine.vllm.waiting import ABORTED, NOT_STORED, NOT_YET, DelayedCalls, Pace
from skymemory.kv.block import Place
from skymemory.kv.value import PAYLOAD_AT, block_header
from skymemory.store.base import Presence

_log = logging.getLogger(__name__)

_THREADS = 4
_WAITING_THREADS = 4
_QUESTION_S = 0.0005
"""A question of a load that waits keeps the interpreter about so long: many such loads pause longer, for the model's
sake.
"""
_PAIRED_S = 0.5
"""Where a value came within, a second thread loads too: one is being verified and copied while the next is fetched. On
a slower link each would only wait for the other, at last for longer than a store may take to answer.
"""
_UNKNOWN_S = 10.0
_UNKNOWN_BYTES_PER_S = 1e6
"""A load is given up after so long, where it is not known how long computing takes."""
_IDLE_S = 0.002
"""So long a step that computes nothing waits for a load to end: else vLLM would spin, and slow the loads."""
_IDLE_SAVING_S = 0.005
"""So long it waits for the saves, which no request waits for; one that comes meanwhile does. Likewise for loads that
another engine's prefill holds up.
"""
_READ_BACK = 4
_SAVED_AT_ONCE = 16
_WAITING = 1 << 16


class _Closed(RuntimeError):
    """The load was given up: its blocks are no longer its own."""


class _Job:
    """One load under way: a sink that writes into the request's blocks, until it is closed."""

    def __init__(
        self, load: Load, copier: BlockCopier, after: Mark, blocks_per_value: int, began_s: float, due_s: float
    ) -> None:
        """``after``: until then the blocks may be another request's."""
        self.load = load
        self._copier = copier
        self._after = after
        self._size = blocks_per_value
        self.began_s, self.due_s = began_s, due_s
        self._writing: dict[int, Mark] = {}
        """By value."""
        self._lock = threading.Lock()
        self._closed = False
        self.placed = 0
        """Leading values in place."""
        self.end: Loaded | None = None

    def place(self, index: int, block: memoryview) -> None:
        skipped, blocks = self.load.places(index, self._size)
        with self._lock:
            if self._closed:
                raise _Closed("the load was given up")
            if blocks:
                self._writing[index] = self._copier.write(blocks, block, skipped, self._size, self._after)
            self.placed = index + 1

    def close(self) -> None:
        """When this returns, nothing is written any more."""
        with self._lock:
            self._closed = True
        self.settle()

    def settle(self) -> None:
        """Until all that was placed is in its blocks."""
        with self._lock:
            writing = list(self._writing.values())
        for mark in writing:
            mark.wait()

    def missing(self) -> tuple[int, ...]:
        """The blocks that were not written."""
        return self.load.blocks[max(0, self.placed * self._size - self.load.skipped_blocks) :]


class _WaitingJob(_Job):
    """A load of what another engine stores meanwhile: one question after the other."""

    def __init__(self, load: Load, copier: BlockCopier, after: Mark, blocks_per_value: int, began_s: float) -> None:
        super().__init__(load, copier, after, blocks_per_value, began_s, began_s + load.wait_s)
        self.pace = Pace()
        self.size_bytes = 0

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._closed

    def came(self, values: int, size_bytes: int, now_s: float) -> None:
        """So many more are in place."""
        if values:
            self.size_bytes += size_bytes
            self.due_s = now_s + self.load.wait_s


class _BackwardJob(_Job):
    """Cake's side of a prompt: values from the last one on, above the fence, by one thread or two."""

    def __init__(
        self, load: Load, copier: BlockCopier, after: Mark, blocks_per_value: int, began_s: float, fence: int
    ) -> None:
        super().__init__(load, copier, after, blocks_per_value, began_s, math.inf)
        self._fence = fence
        self._next = len(load.keys) - 1
        self._done: set[int] = set()
        self.threads = 0
        self.ended_s = began_s
        """When the last of its threads ended, which may be long before the step does."""
        self.size_bytes = 0
        self.reason = ""
        self.lost = 0
        self.reported = False

    def first_block(self, value: int) -> int:
        """Number in the request of the first block that comes from it."""
        return self.load.first_block + max(0, value * self._size - self.load.skipped_blocks)

    def raise_fence(self, block: int) -> None:
        with self._lock:
            self._fence = block
            writing = [mark for index, mark in self._writing.items() if self.first_block(index) < block]
        for mark in writing:
            mark.wait()

    def take(self) -> int | None:
        """The next value to load; None if there is none."""
        with self._lock:
            index = self._next
            if self._closed or self.reason or index < 0 or self.first_block(index) < self._fence:
                return None
            self._next -= 1
            return index

    def place(self, index: int, block: memoryview) -> None:
        skipped, blocks = self.load.places(index, self._size)
        with self._lock:
            if self._closed or self.first_block(index) < self._fence:
                raise _Closed("computing has come as far")
            self._writing[index] = self._copier.write(blocks, block, skipped, self._size, self._after)

    def came(self, index: int, reason: str, size_bytes: int) -> None:
        """A value was placed, or why not; counts when its blocks are written."""
        if (mark := self._writing.get(index)) is not None:
            mark.wait()
        with self._lock:
            self._writing.pop(index, None)
            if reason:
                self.reason, self.lost = self.reason or reason, max(self.lost, index)
                return
            self.size_bytes += size_bytes
            self._done.add(index)
            while len(self.load.keys) - 1 - self.placed in self._done:
                self.placed += 1

    @property
    def lowest(self) -> int:
        """The first block from which on all are in place."""
        return self.first_block(len(self.load.keys) - self.placed)

    def missing(self) -> tuple[int, ...]:
        return ()  # none counts as loaded before it is


class _From:
    """A sink for values of a load from its value ``first`` on."""

    def __init__(self, job: _Job, first: int) -> None:
        self._job = job
        self._first = first

    def place(self, index: int, block: memoryview) -> None:
        self._job.place(self._first + index, block)


class WorkerSide:
    """Called by one thread of vLLM's; its own threads load and save."""

    def __init__(
        self,
        blocks: BlockCache,
        shape: Shape,
        *,
        rank: int = 0,
        queue_bytes: int = 512 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = blocks
        self.shape = shape
        self._rank = rank
        self._clock = clock
        self._copier: BlockCopier | None = None
        self._loaders = TierWorkers("vllm load", _THREADS, _WAITING)
        self._waiters = DelayedCalls("vllm wait", _WAITING_THREADS, _WAITING)
        self._waited_values = 0
        """Since the last step."""
        self._latencies = Latencies()
        self._saver = Saver(blocks, queue_bytes)
        self._ended = threading.Condition()
        self._jobs: list[_Job] = []
        self._backward: dict[str, _BackwardJob] = {}
        self._plan = Plan()
        self._began: Mark = Now()
        self._timed: deque[tuple[int, Mark, Mark]] = deque()
        """Steps that the device may not have done yet: their tokens, begin and end."""
        self._outcome = Outcome()
        self._invalid: set[int] = set()
        self._finished: set[str] = set()

    def register(self, copier: BlockCopier) -> None:
        """The blocks are there."""
        self._copier = copier

    # --- one step ---

    def begin(self, plan: Plan) -> None:
        """Its metadata came: loads start."""
        assert self._copier is not None
        self._plan, self._began = plan, self._copier.mark()
        for request in plan.ends:
            if (job := self._backward.pop(request, None)) is not None:
                job.close()
                self._report_end(job)
        for waiting in self._jobs:
            if isinstance(waiting, _WaitingJob) and waiting.load.request in plan.ends:
                self._end_waiting(waiting, ABORTED)
        for request, fence in plan.fences.items():
            if (job := self._backward.get(request)) is not None:
                job.raise_fence(fence)
        for load in plan.loads:
            if load.backward:
                self._start_backward(load, plan.fences.get(load.request, 0))
            elif load.wait_s:
                self._start_waiting(load)
            else:
                self._start(load)

    def end(self) -> None:
        """The forward is done, or given to the device: completed values are copied out behind it."""
        assert self._copier is not None
        plan, self._plan = self._plan, Plan()
        for save in plan.saves:
            self._saver.save(save, self._copier, rank_key(save.key, self._rank))
        if plan.tokens:
            self._timed.append((plan.tokens, self._began, self._copier.mark()))
        while self._timed and self._timed[0][2].done():
            tokens, began, ended = self._timed.popleft()
            self._outcome.step_tokens, self._outcome.step_s = tokens, ended.seconds_after(began)
            self._blocks.compute.took(tokens, self._outcome.step_s)
        self._report_backward()
        if not plan.tokens and self._jobs:
            all_wait = all(isinstance(job, _WaitingJob) for job in self._jobs)
            with self._ended:
                self._ended.wait_for(
                    lambda: any(job.end is not None for job in self._jobs), _IDLE_SAVING_S if all_wait else _IDLE_S
                )
        elif not plan.tokens:
            self._saver.wait(_IDLE_SAVING_S)
        self._settle()

    def finished(self) -> set[str]:
        """Requests whose loads have ended since the last step, well or not."""
        finished, self._finished = self._finished, set()
        return finished

    def invalid_blocks(self) -> set[int]:
        """Blocks that were not loaded since the last step."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def outcome(self) -> Outcome | None:
        """Since the last step; None if there is nothing to say."""
        outcome, self._outcome = self._outcome, Outcome()
        outcome.counts, outcome.saving, outcome.read_back, outcome.unsaved = self._saver.news()
        with self._ended:
            waited_values, self._waited_values = self._waited_values, 0
        if waited_values:
            outcome.counts["waited_values"] = waited_values
        said = outcome.loaded or outcome.lowest or outcome.step_tokens or outcome.counts or outcome.saving
        return outcome if said else None

    def close(self, drain_s: float) -> None:
        """Stores what waits, as long as ``drain_s``; loads end as given up. See ``Saver.close``."""
        for job in (*self._jobs, *self._backward.values()):
            job.close()
        self._loaders.close()
        self._waiters.close()
        self._saver.close(drain_s)

    # --- loads ---

    def _start(self, load: Load) -> _Job:
        size_bytes = len(load.keys) * self._blocks.layout.block_bytes
        computing_s = self._blocks.compute.seconds(len(load.blocks) * self.shape.block_tokens)
        patience_s = (
            _UNKNOWN_S + size_bytes / _UNKNOWN_BYTES_PER_S
            if computing_s is None
            else patience_while_computing_s(computing_s, self._latencies, size_bytes)
        )
        now_s = self._clock()
        assert self._copier is not None
        job = _Job(load, self._copier, self._began, self.shape.blocks_per_value, now_s, now_s + patience_s)
        self._jobs.append(job)
        if not self._loaders.submit(Call(lambda: self._run(job, computing_s))):
            self._end(job, "too many loads", 0)
        return job

    def _run(self, job: _Job, computing_s: float | None) -> None:
        """In a thread."""
        tally = LoadTally()
        keys = [rank_key(key, self._rank) for key in job.load.keys]
        reason = ""
        try:
            try:
                self._blocks.load_found(keys, job, tally, PhaseClock(time.perf_counter, {}), computing_s)
            finally:
                job.settle()  # what came before a failure counts, too
            reason = next(iter(tally.failed), "")
        except _Closed:
            reason = "deadline"
        except TIER_FAILURES as error:
            _log.warning("a load of %d values failed: %s", len(keys), error)
            reason = "unreachable"
        except BaseException:
            _log.exception("a load of %d values failed by a fault of the connector", len(keys))
            reason = "fault"
        self._end(job, reason, tally.size_bytes)

    def _start_waiting(self, load: Load) -> None:
        assert self._copier is not None
        job = _WaitingJob(load, self._copier, self._began, self.shape.blocks_per_value, self._clock())
        self._jobs.append(job)
        self._waiters.call(lambda: self._ask(job))

    def _ask(self, job: _WaitingJob) -> None:
        """In a thread: once for the next values of a load that waits. Then it is queued again, or after a pause."""
        if job.closed:
            return
        first, began_s = job.placed, self._clock()
        keys = [rank_key(key, self._rank) for key in job.load.keys[first : first + job.pace.values]]
        tally, reason = LoadTally(), ""
        try:
            self._blocks.load_found(keys, _From(job, first), tally, PhaseClock(time.perf_counter, {}), None)
            reason = next(iter(tally.failed), "")
        except _Closed:
            return
        except TIER_FAILURES as error:
            _log.warning("a load that waits for another engine failed: %s", error)
            reason = "unreachable"
        except BaseException:
            _log.exception("a load that waits for another engine failed by a fault of the connector")
            reason = "fault"
        now_s, values = self._clock(), job.placed - first
        job.came(values, tally.size_bytes, now_s)
        with self._ended:
            self._waited_values += values
        if job.placed == len(job.load.keys):
            self._end_waiting(job, "")
        elif reason and reason not in NOT_YET:
            self._end_waiting(job, reason)
        else:
            pause_s = job.pace.came(values, now_s - began_s)
            self._waiters.call(lambda: self._ask(job), pause_s and max(pause_s, len(self._jobs) * _QUESTION_S))

    def _end_waiting(self, job: _WaitingJob, reason: str) -> None:
        job.close()
        reason = reason if job.placed < len(job.load.keys) else ""
        with self._ended:
            if job.end is None:
                job.end = self._end_of(job, reason, job.size_bytes, self._clock() - job.began_s)
            self._ended.notify_all()

    def _start_backward(self, load: Load, fence: int) -> None:
        assert self._copier is not None
        job = _BackwardJob(load, self._copier, self._began, self.shape.blocks_per_value, self._clock(), fence)
        self._backward[load.request] = job
        self._join(job)

    def _join(self, job: _BackwardJob) -> None:
        with self._ended:
            job.threads += self._loaders.submit(Call(lambda: self._run_backward(job)))

    def _run_backward(self, job: _BackwardJob) -> None:
        """In a thread: value after value, until it meets what is computed."""
        while (index := job.take()) is not None:
            began_s = self._clock()
            tally, reason = LoadTally(), ""
            try:
                key = rank_key(job.load.keys[index], self._rank)
                self._blocks.load_found([key], _From(job, index), tally, PhaseClock(time.perf_counter, {}), None)
                reason = next(iter(tally.failed), "")
            except _Closed:
                break
            except TIER_FAILURES as error:
                _log.warning("a load failed: %s", error)
                reason = "unreachable"
            except BaseException:
                _log.exception("a load failed by a fault of the connector")
                reason = "fault"
            job.came(index, reason, tally.size_bytes)
            if index == len(job.load.keys) - 1 and not reason and self._clock() - began_s < _PAIRED_S:
                self._join(job)
        with self._ended:
            job.threads -= 1
            job.ended_s = self._clock()

    def _report_end(self, job: _BackwardJob) -> None:
        if not job.reported:
            job.reported = True
            ended_s = self._clock() if job.threads else job.ended_s
            end = self._end_of(job, job.reason, job.size_bytes, ended_s - job.began_s)
            self._outcome.loaded[job.load.request] = end

    def _report_backward(self) -> None:
        for request, job in self._backward.items():
            if job.placed:
                self._outcome.lowest[request] = job.lowest  # with each step: other ranks may have come less far
            with self._ended:
                ended = not job.threads
            if ended:
                self._report_end(job)

    def _end(self, job: _Job, reason: str, size_bytes: int) -> None:
        seconds = self._clock() - job.began_s
        if not reason:
            self._latencies.took(seconds, size_bytes)
        with self._ended:
            if job.end is None:
                job.end = self._end_of(job, reason, size_bytes, seconds)
            self._ended.notify_all()

    def _end_of(self, job: _Job, reason: str, size_bytes: int, seconds: float) -> Loaded:
        missing_tokens = len(job.missing()) * self.shape.block_tokens if reason else 0
        lost = job.lost if isinstance(job, _BackwardJob) else job.placed
        return Loaded(lost, reason, size_bytes, seconds, missing_tokens, isinstance(job, _WaitingJob))

    def _settle(self) -> None:
        """Report the loads that have ended, and give up those that are overdue."""
        now_s = self._clock()
        for job in list(self._jobs):
            if isinstance(job, _WaitingJob) and job.end is None and now_s >= job.due_s:
                self._end_waiting(job, NOT_STORED)
            with self._ended:
                if job.end is None and now_s >= job.due_s:
                    job.close()
                    # What came says what the rate is; where nothing did, all of it takes longer than this.
                    came = (job.placed or len(job.load.keys)) * self._blocks.layout.block_bytes
                    job.end = self._end_of(job, "deadline", came, now_s - job.began_s)
            if job.end is None:
                continue
            self._jobs.remove(job)
            self._outcome.loaded[job.load.request] = job.end
            if job.end.reason and job.end.reason != ABORTED:
                self._invalid |= set(job.missing())
            self._finished.add(job.load.request)


@dataclass(slots=True)
class _Waiting:
    save_key: bytes
    key: bytes
    """Of this rank's part."""
    place: Place
    value: memoryview
    copied: Mark


class Saver:
    """Values on their way to the store, copied out and bounded; one thread stores them."""

    def __init__(self, blocks: BlockCache, queue_bytes: int) -> None:
        self._blocks = blocks
        self._value_bytes = PAYLOAD_AT + blocks.layout.block_bytes
        self._most = max(1, queue_bytes // self._value_bytes)
        self._free: list[memoryview] = []
        """Of values that were stored: memory that is touched for the first time is ten times slower."""
        self._waiting: deque[_Waiting] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._counts: Counter[str] = Counter()
        self._read_back: list[tuple[int, float]] = []
        self._unsaved: list[bytes] = []
        self._reads_back = True
        self._thread: threading.Thread | None = None

    def save(self, save: Save, copier: BlockCopier, key: bytes) -> None:
        """Copy the value out and queue it; where there is no room it is dropped, and counted."""
        with self._changed:
            if self._held >= self._most or self._stopping:
                self._counts["dropped_values"] += 1
                self._unsaved.append(save.key)
                return
            self._held += 1
            if not self._free:
                self._free += copier.buffers(self._value_bytes)
            value = self._free.pop()
        try:
            copied = copier.read(save.blocks, value[PAYLOAD_AT:])
        except Exception:  # the model's step goes on
            _log.exception("a value could not be copied out by a fault of the connector")
            with self._changed:
                self._held -= 1
                self._free.append(value)
                self._counts["refused_values"] += 1
                self._unsaved.append(save.key)
            return
        with self._changed:
            self._waiting.append(_Waiting(save.key, key, Place(save.depth, save.parent), value, copied))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllm save", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def news(self) -> tuple[dict[str, float], int, list[tuple[int, float]], list[bytes]]:
        """Counts, loads of saved values, and keys not saved, since the last call; and how many values are held now."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
            read_back, self._read_back = self._read_back, []
            unsaved, self._unsaved = self._unsaved, []
            return dict(counts), self._held, read_back, unsaved

    def wait(self, seconds: float) -> None:
        """Until all is saved, so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held, seconds)

    def close(self, drain_s: float) -> None:
        """Stores what waits, as long as ``drain_s``.

        How long it may take is vLLM's to say. `vllm serve` kills its workers at SIGTERM without calling this, unless
        it has a ``--shutdown-timeout`` in seconds; then it goes on stepping until all is saved (``SchedulerSide``'s
        ``saving``) and calls this with nothing left to do. vLLM's ``LLM`` gives 5 s at its end.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(drain_s)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            _log.warning("%d values were not saved: the store took longer than %g s", left, drain_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                batch = [self._waiting.popleft() for _ in range(min(_SAVED_AT_ONCE, len(self._waiting)))]
            counts, unsaved = Counter[str](), [one.save_key for one in batch]
            try:
                for one in batch:
                    one.copied.wait()
                counts, unsaved = self._store(batch)
            except TIER_FAILURES as error:
                counts["refused_values"] += len(batch)
                _log.warning("%d values could not be saved: %s", len(batch), error)
            except Exception:
                counts["refused_values"] += len(batch)
                _log.exception("%d values could not be saved by a fault of the connector", len(batch))
            with self._changed:
                self._held -= len(batch)
                self._free += [one.value for one in batch]
                self._counts.update(counts)
                self._unsaved += unsaved
                self._changed.notify_all()

    def _store(self, batch: list[_Waiting]) -> tuple[Counter[str], list[bytes]]:
        """Store those of ``batch`` that the store does not have; returns counts, and the keys that it did not take."""
        began_s = time.perf_counter()
        presence = self._blocks.store.lookup([one.key for one in batch])
        missing, items, places = [], [], []
        for one, present in zip(batch, presence, strict=True):
            if present is Presence.MISS:
                one.value[:PAYLOAD_AT] = block_header(one.key, self._blocks.layout, 0, one.value[PAYLOAD_AT:])
                missing.append(one.save_key)
                items.append((one.key, one.value))
                places.append(one.place)
        done = self._blocks.put(items, places) if items else []
        stored, took_s = sum(done), time.perf_counter() - began_s
        if self._reads_back and stored and not self._stopping:
            self._reads_back = False
            self._load([key for (key, _), ok in zip(items, done, strict=True) if ok][:_READ_BACK])
        counts = Counter(
            saved_values=stored,
            present_values=len(batch) - len(items),
            refused_values=len(items) - stored,
            saved_bytes=stored * self._value_bytes,
            saving_us=round(took_s * 1e6),
        )
        return counts, [key for key, ok in zip(missing, done, strict=True) if not ok]

    def _load(self, keys: list[bytes]) -> None:
        """Once, for the link's latency and rate: else the first prompt that is found stored would have to try them."""
        for number, some in enumerate((keys[:1], keys[:1], keys)):
            began_s = time.perf_counter()
            values = self._blocks.store.get_many(some)
            took = len(some) * self._blocks.layout.block_bytes, time.perf_counter() - began_s
            if number and all(value is not None for value in values):  # the first one touches fresh memory
                with self._changed:
                    self._read_back.append(took)
