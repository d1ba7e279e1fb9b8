"""Engines and the router of the routing demo as processes, started with the `skymemory` command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from skymemory.testbed.liveness import StartWait

_LOOK_S = 0.5
GRACE_S = 5.0
_ADDRESS = re.compile(r"http://[^\s/]+:\d+")
# Four engines share the cores: with a pool of threads each they would slow each other down, and unevenly.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@asynccontextmanager
async def service(what: str, addresses: int, *words: str) -> AsyncIterator[list[str]]:
    """``skymemory WORDS``, from the output of its ``addresses`` addresses to the end of the block.

    It has its own session, so that Ctrl-C reaches only this process, and ends with this process: its standard input is
    a pipe from here.

    Raises:
        SkyMemoryError: the command ended, or made no progress (``testbed.liveness``), before it printed its addresses.
    """
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "skymemory.cli.main",
            "--end-with-stdin",
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_ONE_THREAD},
            # Ctrl-C goes to every process of the terminal's group; the demo ends its children itself, in order.
            start_new_session=True,
        )
        try:
            yield await _addresses(what, addresses, process, log)
        finally:
            await _end(process)


async def _addresses(what: str, addresses: int, process: asyncio.subprocess.Process, log: IO[bytes]) -> list[str]:
    """The addresses in its first lines."""
    assert process.stdout is not None
    found: list[str] = []
    wait = StartWait(what, process.pid, lambda: _read(log))
    reading = asyncio.ensure_future(process.stdout.readline())
    try:
        while len(found) < addresses:
            if not (await asyncio.wait([reading], timeout=_LOOK_S))[0]:
                wait.check()
                continue
            if not (line := reading.result()):
                raise wait.on_exit(await asyncio.wait_for(process.wait(), GRACE_S))
            found += _ADDRESS.findall(line.decode(errors="replace"))
            reading = asyncio.ensure_future(process.stdout.readline())
    finally:
        reading.cancel()
    return found


def _read(log: IO[bytes]) -> str:
    # At an offset: the child writes at the position that it shares with us.
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closes its input, which ends it; kills it after ``GRACE_S``."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
