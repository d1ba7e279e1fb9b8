"""How many files a reader opens to follow one operation: ``python -m tools.files_opened [--json]``.

Counted are the files of the package in which a function runs (``sys.setprofile``, all threads), the functions, and the
calls: of a warm ``get_cache`` from a constellation (the ground host's side), of a proxied request, and of four requests
in the cluster simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import skymemory
import skymemory_lab

SOURCES = tuple(str(Path(str(package.__file__)).parents[1]) for package in (skymemory, skymemory_lab))
SKYMEMORY = (sys.executable, "-m", "skymemory")


@dataclass
class Seen:
    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str, int]] = field(default_factory=set)
    calls: int = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        source = next((source for source in SOURCES if code.co_filename.startswith(f"{source}/")), None)
        if event == "call" and source is not None:
            self.calls += 1
            self.files.add(code.co_filename[len(source) + 1 :])
            self.functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    def as_json(self) -> dict[str, Any]:
        return {
            "files": len(self.files),
            "functions": len(self.functions),
            "calls": self.calls,
            "opened": sorted(self.files),
        }


def warm_get_cache() -> Seen:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from skymemory import KVCManager, open_store

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 256, (1, 513), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        run = ("--run-dir", folder)
        subprocess.run(
            [*SKYMEMORY, "constellation", "up", "--base-port", "auto", *run], check=True, capture_output=True
        )
        try:
            seen = Seen()
            # Threads of the store are watched from their beginning, and what they did before is thrown away.
            threading.setprofile(seen)
            with KVCManager(model, None, store=open_store(f"constellation://{folder}")) as kvc:
                kvc.add_blocks_ids(ids)
                for _ in range(2):
                    assert kvc.get_cache_ids(ids).result.cached_tokens == 512
                seen.files.clear(), seen.functions.clear()
                seen.calls = 0
                sys.setprofile(seen)
                kvc.get_cache_ids(ids)
                sys.setprofile(None)
            threading.setprofile(None)
            return seen
        finally:
            subprocess.run([*SKYMEMORY, "constellation", "down", *run], check=True, capture_output=True)


def proxied_request() -> Seen:
    from tests.router.running import Loop, Running

    loop = Loop()
    running = Running(loop).start(2, strategy="least-ttft")
    seen = Seen()

    async def watch(profile: Callable[..., Any] | None) -> None:
        sys.setprofile(profile)

    try:
        for _ in range(3):
            assert running.complete().status == 200
        loop.run(watch(seen))
        assert running.complete().status == 200
        loop.run(watch(None))
        loop.run(asyncio.sleep(0))
    finally:
        running.close()
        loop.close()
    return seen


def four_requests_of_a_cluster() -> Seen:
    from skymemory_lab.sim.cluster.setup import ClusterSetup
    from skymemory_lab.sim.cluster.simulation import run_cluster
    from skymemory_lab.sim.trace import TraceRequest

    requests = [TraceRequest(float(at), 2_048, 8, tuple(range(4))) for at in range(4)]
    setup = ClusterSetup(prefill=2, decode=2)
    seen = Seen()
    sys.setprofile(seen)
    run_cluster(requests, setup, "kvcache-centric")
    sys.setprofile(None)
    return seen


WAYS: dict[str, Callable[[], Seen]] = {
    "a warm get_cache from the constellation": warm_get_cache,
    "a proxied request": proxied_request,
    "four requests in the cluster simulator": four_requests_of_a_cluster,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {name: way().as_json() for name, way in WAYS.items()}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, one in found.items():
        print(f"{name}: {one['files']} files, {one['functions']} functions, {one['calls']} calls")
        print("".join(f"    {file}\n" for file in one["opened"]))


if __name__ == "__main__":
    main()
