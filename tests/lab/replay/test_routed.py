"""``skymemory replay`` through ``skymemory route`` to two engines, all as processes: as a person would type it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from skymemory_lab.demo.processes import service

PATIENCE_S = 90.0


@pytest.mark.slow
def test_both_engines_counted_together_what_the_answers_said() -> None:
    """Tokens, hits and requests to the unit; and caches are used: the requests come one after another."""
    reported = asyncio.run(_replayed())
    assert reported["completed"] == reported["asked"] == 24 and not reported["faults"]
    assert reported["engines"] == {
        "requests": 24,
        "prompt_tokens": reported["prompt_tokens"],
        "cached_tokens": reported["cached_tokens"],
        "output_tokens": reported["output_tokens"],
    }
    assert 0 < reported["hit_ratio"] <= reported["reusable"] + 0.02


async def _replayed() -> dict[str, object]:
    serve = ("serve", "--engines", "2", "--listen", "127.0.0.1:0", "--cache", "128MiB")
    async with service("the engines", 2, *serve) as engines:
        backends = [word for url in engines for word in ("--backend", url)]
        async with service("the router", 1, "route", *backends, "--listen", "127.0.0.1:0") as (router,):
            metrics = [word for url in engines for word in ("--metrics", url)]
            words = ("--workload", "tenants", "--requests", "24", "--rate", "0.15", "--scale-lengths", "0.02")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "skymemory",
                "replay",
                "--url",
                router,
                *metrics,
                *words,
                "--max-tokens",
                "3",
                "--json",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            finally:
                if process.returncode is None:
                    process.kill()
    report: dict[str, object] = json.loads(out)
    return report
