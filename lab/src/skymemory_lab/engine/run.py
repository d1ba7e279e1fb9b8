"""The engine in a process, or several such processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from aiohttp import web

from skymemory.addresses import format_address
from skymemory.engine.transformers.models import ReadyModel, ready_model
from skymemory.errors import InvalidInput, SkyMemoryError, cannot_listen
from skymemory.forks import interrupts_held
from skymemory.progress import Progress
from skymemory.store.base import Store
from skymemory.testbed.open_store import kinds_of, open_store, without_password
from skymemory.units import format_size
from skymemory_lab.engine.caches import PrefixCaches
from skymemory_lab.engine.events import KVPublisher
from skymemory_lab.engine.handover import BlockFetcher, BlockSaver
from skymemory_lab.engine.http import OpenAIServer, make_runner
from skymemory_lab.engine.metrics import PublishedMetrics
from skymemory_lab.engine.requests import RequestReader
from skymemory_lab.engine.thread import PREFILL_TOKENS, EngineThread

_GOODBYE_S = 2.0
ROLES = ("producer", "consumer", "both")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model: str = "small"
    """Name in ``engine.inputs.MODEL_NAMES``, or a folder."""
    served_name: str = ""
    """Name in the API; default: the folder's."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    cache_bytes: int = 64 << 20
    """Budget of the prefix cache; 0: none."""
    block_tokens: int = 16
    policy: str = "lru"
    dtype: str = "float32"
    threads: int = 1  # of torch
    context_tokens: int | None = None  # None: the model's
    max_running: int = 8  # answers decoded at once
    max_waiting: int = 256
    kv_events: str | None = None
    """ZeroMQ endpoint; ``kv_replay`` is for missed batches."""
    kv_replay: str = "tcp://127.0.0.1:*"
    store: str = ""
    """Address of a shared store; empty: none."""
    role: str = "both"
    """A producer saves its blocks, a consumer fetches blocks."""
    wait_s: float = 5.0
    """Time limit for the next block, and for a prefill's blocks to be stored."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidInput(f"role {self.role!r}: expected one of {', '.join(ROLES)}")
        if not self.store:
            if self.role != "both":
                raise InvalidInput(f"--role {self.role} is about a store: give its address by --store")
        elif "memory" in kinds_of(self.store)[:1]:
            raise InvalidInput(
                f"--store {self.store}: memory of this process, which no other engine sees: serve one by `skymemory "
                "store serve memory://1GiB`, and give the address that it prints"
            )

    @property
    def saves(self) -> bool:
        return bool(self.store) and self.role != "consumer"

    @property
    def loads(self) -> bool:
        return bool(self.store) and self.role != "producer"


class Engine:
    """Model, prefix cache, engine thread and HTTP application, joined as ``settings`` say."""

    def __init__(self, settings: EngineSettings, progress: Progress | None = None) -> None:
        # Before the model is loaded, so that an error shows quickly.
        self.store: Store | None = open_store(settings.store) if settings.store else None
        try:
            self._build(settings, progress or Progress(io.StringIO()))
        except BaseException:
            if self.store is not None:
                self.store.close()
            raise

    def _build(self, settings: EngineSettings, progress: Progress) -> None:
        torch.set_num_threads(settings.threads)  # by default each of several engines would use all cores
        with progress.wait(f"loading the model {settings.model!r}") as wait:
            ready = ready_model(settings.model, dtype=settings.dtype, report=wait.on_progress)
        self.name = settings.served_name or Path(settings.model).resolve().name
        context_tokens = _context(ready, settings.context_tokens)
        with progress.wait("computing the model's first tokens"):
            _warm(ready, context_tokens)
        self.publisher: KVPublisher | None = None
        sources: list[dict[str, object]] = []
        with progress.wait("hashing the weights and preparing the cache"):
            self.caches = PrefixCaches(
                ready.model, ready.tokenizer, settings.cache_bytes, settings.block_tokens, settings.policy
            )
        if settings.store:
            _check_can_share(self.caches, settings)
        if settings.kv_events is not None:
            topic = f"kv@{settings.host}@{self.name}"
            self.publisher = KVPublisher(settings.kv_events, settings.kv_replay, topic)
            self.caches.on_events = self.publisher.publish
            at, replay_at = self.publisher.at, self.publisher.replay_at
            sources = [{"data_parallel_rank": 0, "endpoint": at, "replay_endpoint": replay_at, "topic": topic}]
        metrics = PublishedMetrics(self.name)
        self.saver: BlockSaver | None = None
        self.fetcher: BlockFetcher | None = None
        if self.store is not None and settings.saves:
            self.saver = BlockSaver(self.store, self.caches.store, self.caches.value_bytes, metrics)
        self.thread = EngineThread(
            ready,
            self.caches,
            metrics,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            saver=self.saver,
        )
        if self.store is not None and settings.loads:
            self.fetcher = BlockFetcher(self.store, self.thread, self.caches, metrics, settings.wait_s)
        metrics.watch(
            waiting=lambda: self.thread.waiting,
            running=lambda: self.thread.running,
            usage=self._usage,
            block_tokens=settings.block_tokens,
            blocks=self.caches.capacity_blocks,
        )
        vocabulary = ready.model.get_input_embeddings().weight.shape[0]
        reader = RequestReader(
            self.name,
            ready.tokenizer,
            vocabulary,
            context_tokens,
            saves=self.saver is not None,
            loads=self.fetcher is not None,
        )
        self.application = OpenAIServer(
            reader, self.thread, metrics, sources, fetcher=self.fetcher, wait_s=settings.wait_s
        ).application

    def close(self) -> None:
        """Stop; waiting requests end with an error. Idempotent."""
        self.thread.close()
        if self.fetcher is not None:
            self.fetcher.close()
        if self.saver is not None:
            self.saver.close(_GOODBYE_S)
        self.caches.close()
        if self.store is not None:
            self.store.close()
        if self.publisher is not None:
            self.publisher.close()

    def _usage(self) -> float:
        room = self.caches.capacity_blocks * self.caches.block_tokens
        return min(1.0, self.thread.held_tokens / room) if room else 0.0


def run_engine(
    settings: EngineSettings,
    say: Callable[[str], None],
    listener: socket.socket | None = None,
    progress: Progress | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; the first line for ``say`` has the address."""
    # Bound before the model is loaded, so that an error shows quickly.
    with listener or bound(settings.host, settings.port) as listening:
        engine = Engine(settings, progress)
        try:
            asyncio.run(_serve(engine, listening, settings, say))
        finally:
            engine.close()


async def _serve(engine: Engine, listener: socket.socket, settings: EngineSettings, say: Callable[[str], None]) -> None:
    runner = make_runner(engine.application(), _GOODBYE_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        host, port = runner.addresses[0][:2]
        say(f"{engine.name} at http://{format_address(host, port)}/v1")
        blocks = engine.caches.capacity_blocks
        say(f"prefix cache of {format_size(settings.cache_bytes)}: {blocks:,} blocks of {settings.block_tokens} tokens")
        if settings.store:
            verbs = {"producer": "saves blocks in", "consumer": "fetches blocks from", "both": "shares blocks by"}
            say(f"{verbs[settings.role]} {without_password(settings.store)}")
        if engine.publisher is not None:
            say(f"KV events at {engine.publisher.at}, missed ones at {engine.publisher.replay_at}")
        await _stop_signal()
        await asyncio.to_thread(engine.thread.close)
    finally:
        await runner.cleanup()


async def _stop_signal() -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            # SO_REUSEADDR: a restarted engine gets its port at once, though connections of the last process are in
            # TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidInput(f"--listen: {cannot_listen(f'{host}:{port}', error)}") from error
    return listener


def _check_can_share(caches: PrefixCaches, settings: EngineSettings) -> None:
    if caches.states_kept:
        raise InvalidInput(
            f"--store: {settings.model} has recurrent states, which are not handed over: leave --store out"
        )
    if not caches.capacity_blocks:
        raise InvalidInput(
            f"--store: blocks pass through the prefix cache, and --cache {format_size(settings.cache_bytes)} is less "
            f"than one of {format_size(caches.value_bytes)}: give room for the prompts under way"
        )


def _context(ready: ReadyModel, context_tokens: int | None) -> int:
    limit = int(getattr(ready.model.config, "max_position_embeddings", 0) or context_tokens or 4096)
    if context_tokens is not None and not 2 <= context_tokens <= limit:
        raise InvalidInput(f"context: {context_tokens}: expected 2 to {limit}, the model's context length")
    return context_tokens or limit


def _warm(ready: ReadyModel, context_tokens: int) -> None:
    """Run a prefill, as the first is slow."""
    ids = torch.zeros((1, min(PREFILL_TOKENS, context_tokens)), dtype=torch.long, device=ready.model.device)
    with torch.inference_mode():
        ready.model(input_ids=ids)


# --- several engines, each a process with its own port ---
#
# Forked after importing torch, which takes longer than loading a small model; but before torch has computed anything,
# because its threads would be missing in the child.


def run_engines(settings: EngineSettings, count: int, say: Callable[[str], None]) -> None:
    """Run ``count`` engines, at consecutive ports if ``settings`` has a port, until this process ends in any way.

    Raises:
        SkyMemoryError: an engine failed; the others were stopped.
    """
    for endpoint in (settings.kv_events, settings.kv_replay) if settings.kv_events is not None else ():
        if endpoint is not None and not endpoint.endswith(":*"):
            raise InvalidInput(f"{endpoint!r}: several engines cannot share an endpoint: end it with :*")
    listeners: list[socket.socket] = []
    try:
        for at in range(count):
            listeners.append(bound(settings.host, settings.port + at if settings.port else 0))
        sys.stdout.flush()  # otherwise each child would print the buffered output, too
        read_end, write_end = os.pipe()
        with interrupts_held():
            children = {_forked(settings, at, listeners, read_end, write_end, say) for at in range(count)}
    finally:
        for listener in listeners:
            listener.close()
    os.close(read_end)
    _wait_for(children)
    os.close(write_end)


def _forked(
    settings: EngineSettings,
    at: int,
    listeners: Sequence[socket.socket],
    read_end: int,
    write_end: int,
    say: Callable[[str], None],
) -> int:
    # Fork the engine of ``listeners[at]``; return its pid. By the pipe it notices the parent's end.
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent forwards it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.close(write_end)
        for listener in (*listeners[:at], *listeners[at + 1 :]):
            listener.close()
        threading.Thread(target=_end_with, args=(read_end,), name="line", daemon=True).start()
        # All engines load at the same time: the first shows progress for all.
        progress = Progress(sys.stderr if at == 0 else io.StringIO())
        run_engine(replace(settings, port=listeners[at].getsockname()[1]), say, listeners[at], progress)
        code = 0
    except SkyMemoryError as error:
        print(f"skymemory: {error}", file=sys.stderr, flush=True)  # noqa: T201
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # not sys.exit: the parent's exit handlers must not run here


def _end_with(line: int) -> None:
    """Exit with the parent, which alone holds the other end of the pipe."""
    while os.read(line, 1):
        pass
    os._exit(1)


def _wait_for(children: set[int]) -> None:
    """Wait for all children; if a child fails, stop the others.

    Signals are forwarded as SIGTERM, which also ends loading children.
    """
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        for pid in children:
            os.kill(pid, signal.SIGTERM)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    failed = 0
    try:
        while children:
            pid, status = os.wait()
            children.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            if code and not failed and not (stopped and code == -signal.SIGTERM):
                failed = pid
                stop()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if failed:
        raise SkyMemoryError(f"the engine with pid {failed} failed; the others were stopped")
