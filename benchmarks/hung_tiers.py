"""What a tier that hangs costs prompts: `python benchmarks/hung_tiers.py [--json FILE] [--tokens N]`.

Memory over disk, Redis and the constellation (95 satellites in five processes, loopback), in front of the small trained
model. Each prompt is held by one of the three alone, which is then stopped (SIGSTOP for Redis and for all hosts of the
constellation; the disk, which no signal stops, by calls that do not come back). *Known*: the tier has supplied eight
prompts before; *first*: it was never asked, and the model has computed nothing. Per prompt all waiting for the tiers is
counted (lookup, fetch; for a put lookup and store), the answers of the healthy ones included.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from _bench import constellation, print_table, redis_server, write_json
from skymemory.cache.patience import recompute_cost
from skymemory.cache.tiers.store import TieredStore
from skymemory.cache.tiers.tier import TierSettings
from skymemory.engine.transformers.huggingface import KVCManager
from skymemory.engine.transformers.models import ready_model
from skymemory.store.base import LoadTicket, StoreTicket
from skymemory.store.disk import DiskStore
from skymemory.store.memory import MemoryStore
from skymemory.store.redis import RedisStore
from skymemory.testbed.connect import open_constellation

KNOWN_PROMPTS = 8
HUNG_PROMPTS = 6
Stop = Callable[[], AbstractContextManager[None]]


class DiskThatHangs(DiskStore):
    """Its reads and writes do not come back while ``going`` is not set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30)
        self.going = threading.Event()
        self.going.set()

    def complete_load(self, ticket: LoadTicket) -> list[memoryview | None]:
        self.going.wait()
        return super().complete_load(ticket)

    def complete_store(self, ticket: StoreTicket) -> list[bool]:
        self.going.wait()
        return super().complete_store(ticket)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.going.clear()
        yield
        self.going.set()


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    ready = ready_model("small", dtype="float32")
    rows = []
    with tempfile.TemporaryDirectory() as folder, constellation() as (_, run_dir), redis_server() as port:
        hosts = [json.loads(path.read_text("utf-8"))["pid"] for path in run_dir.glob("host-*.pid")]
        redis = redis_pid(port) if port is not None else 0
        for number, name in enumerate(
            ("disk", "redis", "constellation") if port is not None else ("disk", "constellation")
        ):
            for known in (True, False):
                disk = DiskThatHangs(Path(folder) / f"{name}{known}")
                far = [
                    disk,
                    *([RedisStore(f"redis://127.0.0.1:{port}")] if port is not None else []),
                    open_constellation(run_dir),
                ]
                stop: Stop = {"disk": disk.stopped, "redis": lambda: stopped([redis])}.get(name, lambda: stopped(hosts))
                tiers = TieredStore(
                    [(MemoryStore(), TierSettings(local=True)), *((one, TierSettings()) for one in far)]
                )
                rows.append(measure(ready.model, tiers, name, known, stop, options.tokens, 100 * number + 10 * known))
                time.sleep(3.0)  # for those who were stopped to catch up
                tiers.close()
    print_table(
        "What a tier that hangs costs a prompt, ms",
        [
            "tier",
            "",
            "computing",
            "healthy",
            "usual p99",
            "may cost",
            "first prompt",
            "the next five, most",
            "a put then",
        ],
        [
            [row["tier"], "known" if row["known"] else "first", *(f"{row[what]:.1f}" for what in FIGURES)]
            for row in rows
        ],
    )
    if options.json:
        write_json(options.json, "hung_tiers", 0, rows)


FIGURES = ("computing_ms", "healthy_ms", "usual_p99_ms", "may_cost_ms", "first_ms", "next_ms", "put_ms")


def redis_pid(port: int) -> int:
    import redis

    return int(redis.Redis(port=port).info("server")["process_id"])


def measure(
    model: object, tiers: TieredStore, name: str, known: bool, stop: Stop, tokens: int, seed: int
) -> dict[str, object]:
    dice = np.random.default_rng(seed)
    tier = next(one for one in tiers.tiers if one.name == name)
    prompts = [dice.integers(5, 900, tokens) for _ in range(KNOWN_PROMPTS + HUNG_PROMPTS)]
    with KVCManager(model, store=tier.store, weights="benchmark") as writer:  # type: ignore[arg-type]
        for prompt in prompts:
            assert writer.add_blocks_ids(prompt).stored_blocks
        computing_s = writer.blocks.compute.seconds(tokens)
    assert computing_s is not None
    with KVCManager(model, store=tiers, weights="benchmark") as kvc:  # type: ignore[arg-type]
        healthy: list[float] = []
        if known:
            kvc.blocks.compute.record(tokens, computing_s)
            for prompt in prompts[:KNOWN_PROMPTS]:
                kvc.get_cache_ids(prompt)  # of a slow one the first may be given up
                healthy.append(waited_s(kvc.last.seconds))
            assert set(kvc.last.hit_tokens) == {name}
        size_bytes = int(tier.mean_value_bytes * (tokens // kvc.layout.block_tokens))
        usual_s = tier._latencies["load"].p99_s(size_bytes) or 0.0
        with recompute_cost(kvc.blocks.compute.seconds(tokens)):
            may_s = tier.deadline_s("load", size_bytes)
        with stop():
            waited = []
            for prompt in prompts[KNOWN_PROMPTS:]:
                found = kvc.get_cache_ids(prompt).result
                assert not found.hit_tokens
                waited.append(waited_s(found.seconds))
            put = kvc.add_blocks_ids(dice.integers(5, 900, tokens)).seconds
        return {
            "tier": name,
            "known": known,
            "computing_ms": 1e3 * computing_s,
            "healthy_ms": 1e3 * statistics.median(healthy or [0.0]),
            "usual_p99_ms": 1e3 * usual_s,
            "may_cost_ms": 1e3 * may_s,
            "first_ms": 1e3 * waited[0],
            "next_ms": 1e3 * max(waited[1:]),
            "put_ms": 1e3 * (put.get("lookup", 0.0) + put.get("store", 0.0)),
        }


def waited_s(seconds: dict[str, float]) -> float:
    """For all tiers, by one prompt."""
    return seconds.get("lookup", 0.0) + seconds.get("fetch", 0.0)


if __name__ == "__main__":
    main()
