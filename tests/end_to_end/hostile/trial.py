"""One trial: engines, `skymemory route` as a process, clients that do nothing wrong, and one cause of trouble."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import ssl
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

import psutil
from tests.end_to_end.hostile.clients import Others, Result

ENGINES = 3
QUOTA = 256
"""Requests at once of either tenant, where there are keys."""
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    """As in the table."""
    who_pays: str
    attack: str = ""
    """A cause of ``causes``; empty: none, an engine is at fault."""
    count: int = 0
    """Its connections."""
    mode: str = "ok"
    """Of the first engine, or of ``all_engines``."""
    all_engines: bool = False
    streams: bool | None = None
    tls: bool = False
    keys: bool = False
    files: int = 0
    """The router's hard limit of open files; 0: this process's."""


@dataclass(slots=True)
class Outcome:
    name: str
    who_pays: str
    asked: int
    share: float
    """Of the others' requests during the cause, those answered 200."""
    p99_s: float
    after_share: float
    after_p99_s: float
    most_sends: int
    """To engines, of one request."""
    sends: float
    """To engines, per request of the others."""
    at_bad_engine: int | None
    """Requests that the engine at fault got."""
    mib: float
    """The router's memory, at its most."""
    others: dict[str, int] = field(default_factory=dict)
    attackers: dict[str, int] = field(default_factory=dict)


CAUSES: tuple[Cause, ...] = (
    Cause("none", ""),
    Cause("request of death", "the request", "request_of_death", 3),
    Cause("32 bodies, a byte short", "the slowest body", "held_bodies", 32),
    Cause("9,000 half heads", "the oldest head", "half_heads", 9000),
    Cause("engine hangs, whole answers", "the engine", mode="hang", streams=False),
    Cause("engine hangs, streams", "the engine", mode="hang", streams=True),
    Cause("engine answers 500", "the engine", mode="500"),
    Cause("engine answers 429", "the engine", mode="429"),
    Cause("every engine answers 503", "all, at once", mode="503", all_engines=True),
    Cause("100 slow readers", "the slowest reader", "slow_readers", 100),
    Cause("40 slow readers of streams", "the slowest reader", "slow_streams", 40),
    Cause("2,000 half TLS handshakes", "the oldest handshake", "half_handshakes", 2000, tls=True, files=3072),
    Cause("256 files, 400 idle clients", "the longest idle", "idle", 400, files=256),
    Cause("16 KB that unpack to 4 million prompts", "the request", "many_items", 8),
    Cause("10 bodies in chunks of a byte", "each by its turn", "tiny_chunks", 10),
    Cause("a tenant beyond its quota", "the tenant", "flood", 1000, keys=True),
)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


@contextmanager
def process(*command: str, files: int = 0) -> Iterator[tuple[Popen[str], str]]:
    """Yields it and its first line."""

    def limited() -> None:
        if files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    running = Popen(
        [sys.executable, *command],
        stdout=PIPE,
        stderr=DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=limited,
    )
    assert running.stdout is not None
    try:
        yield running, running.stdout.readline()
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def script(port: int, word: str) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/script/{word}", timeout=10) as answer:
        found: dict[str, object] = json.load(answer)
        return found


@dataclass(frozen=True, slots=True)
class Times:
    before_s: float = 2.0
    cause_s: float = 8.0
    settle_s: float = 2.0
    """After the cause, before recovery is measured."""
    after_s: float = 2.0


def run(cause: Cause, times: Times = Times(), progress: Callable[[str], None] = lambda line: None) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        options, context, keys = _options(cause, Path(folder))
        with process("-m", "tests.end_to_end.hostile.engines", str(ENGINES)) as (_, line):
            ports = [int(word) for word in line.split()]
            backends = [f"--backend=http://127.0.0.1:{port}" for port in ports]
            command = ("-m", "skymemory", "route", "--listen", "127.0.0.1:0", *backends, *options)
            with process(*command, files=cause.files) as (router, line):
                port = int(line.split("127.0.0.1:")[1].split(":")[0])
                trial = _Trial(cause, times, ports, port, router.pid, context, keys)
                return asyncio.run(trial.run(progress))


def _options(cause: Cause, folder: Path) -> tuple[list[str], ssl.SSLContext | None, list[str]]:
    """The router's further options, the others' TLS, and the keys of the others and of the attacker."""
    options, context, keys = [], None, ["", ""]
    if cause.tls:
        from skymemory.router.tls import self_signed

        made = self_signed()
        (folder / "door.pem").write_bytes(made.chain)
        (folder / "door.key").write_bytes(made.key)
        options += ["--tls-cert", str(folder / "door.pem"), "--tls-key", str(folder / "door.key")]
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if cause.keys:
        from skymemory.router.api_keys import new_key, with_key

        keys = [new_key(b"o" * 32), new_key(b"h" * 32)]
        said = "".join(f"[tenants.{name}]\nmax_in_flight = {QUOTA}\n\n" for name in ("others", "hostile"))
        (folder / "keys.toml").write_text(with_key(with_key(said, "others", keys[0]), "hostile", keys[1]))
        options += ["--api-keys", str(folder / "keys.toml")]
    return options, context, keys


@dataclass(slots=True)
class _Trial:
    cause: Cause
    times: Times
    engines: list[int]
    port: int
    router: int
    context: ssl.SSLContext | None
    keys: list[str]
    most_bytes: int = 0

    async def run(self, progress: Callable[[str], None]) -> Outcome:
        cause, times = self.cause, self.times
        others = Others(self.port, tls=self.context, key=self.keys[0], streams=cause.streams)
        watching = asyncio.create_task(self._watch())
        others.start()
        await asyncio.sleep(times.before_s)
        progress(f"{cause.name}: for {times.cause_s:g} s")
        bad = self.engines if cause.all_engines else self.engines[:1]
        before = await self._prompts()
        bad_before = sum(before[port][0] for port in bad)
        began_s = time.monotonic()
        await self._set(bad, cause.mode)
        attackers = await self._attack()
        reached = await self._prompts()
        at_bad = sum(reached[port][0] for port in bad) - bad_before
        ended_s = time.monotonic()
        await self._set(bad, "ok")
        progress(f"{cause.name}: after it")
        await asyncio.sleep(times.settle_s)
        after_s = time.monotonic()
        await asyncio.sleep(times.after_s)
        end_s = time.monotonic()
        await asyncio.sleep(0.5)
        await others.stop()
        watching.cancel()
        during = [each for each in others.results if began_s <= each.began_s < ended_s]
        after = [each for each in others.results if after_s <= each.began_s < end_s]
        by_id: dict[str, int] = {}
        for _, theirs in (await self._prompts()).values():
            for mark, number in theirs.items():
                by_id[mark] = by_id.get(mark, 0) + number
        sent = [number for mark, number in by_id.items() if mark.startswith("o")]
        return Outcome(
            cause.name,
            cause.who_pays,
            len(during),
            _share(during),
            percentile([each.took_s for each in during], 0.99),
            _share(after),
            percentile([each.took_s for each in after], 0.99),
            max((number for mark, number in by_id.items() if mark), default=0),
            sum(sent) / max(1, len(sent)),
            at_bad if cause.mode != "ok" and not cause.all_engines else None,
            self.most_bytes / (1 << 20),
            _counts(during),
            attackers,
        )

    async def _attack(self) -> dict[str, int]:
        cause, seconds = self.cause, self.times.cause_s
        if not cause.attack:
            await asyncio.sleep(seconds)
            return {}
        words = [cause.attack, str(self.port), str(seconds), str(cause.count), *self.keys[1:]]
        module = "tests.end_to_end.hostile.causes"
        attacking = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *words, stdout=PIPE, stderr=DEVNULL, cwd=ROOT
        )
        try:
            said, _ = await attacking.communicate()
        finally:
            if attacking.returncode is None:
                attacking.kill()
        found: dict[str, int] = json.loads(said or "{}")
        return found

    async def _set(self, ports: list[int], mode: str) -> None:
        for port in ports:
            await asyncio.to_thread(script, port, mode)

    async def _prompts(self) -> dict[int, tuple[int, dict[str, int]]]:
        found = {}
        for port in self.engines:
            said = await asyncio.to_thread(script, port, "counts")
            found[port] = said["prompts"], said["by_id"]
        return found  # type: ignore[return-value]

    async def _watch(self) -> None:
        router = psutil.Process(self.router)
        while True:
            self.most_bytes = max(self.most_bytes, router.memory_info().rss)
            await asyncio.sleep(0.05)


def _share(results: list[Result]) -> float:
    return sum(each.what == "200" for each in results) / len(results) if results else 0.0


def _counts(results: list[Result]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in results:
        found[each.what] = found.get(each.what, 0) + 1
    return dict(sorted(found.items()))
