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

from skymemory.errors import SkyMemoryError

START_S = 90.0
"""Start timeout: four engines import torch at the same time."""
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
        SkyMemoryError: the command ended, or printed no address for ``START_S``; with its last line of output.
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
    try:
        async with asyncio.timeout(START_S):
            while len(found) < addresses and (line := await process.stdout.readline()):
                found += _ADDRESS.findall(line.decode(errors="replace"))
    except TimeoutError:
        pass
    if len(found) < addresses:
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()
        raise SkyMemoryError(f"{what} did not start: {last[-1] if last else 'no output'}")
    return found


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
