"""An endpoint picker as a process: it follows its settings, and stops without dropping what it has begun."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from skymemory.errors import InvalidInput
from skymemory.keys import KeyRing
from skymemory.router.epp import EndpointPicker
from skymemory.router.epp_setup import desk_settings, endpoint_picker, needs_restart
from skymemory.router.settings import Settings
from skymemory.router.settings_follow import follow
from skymemory.router.tasks import ended

log = logging.getLogger("skymemory.router")


def reload(picker: EndpointPicker, read: Callable[[], Settings]) -> None:
    """Read the settings anew. Those that cannot be meant change nothing."""
    try:
        settings = read()
        fixed = needs_restart(settings, picker.at_start)
        picker.reset(settings, desk_settings(settings))
    except InvalidInput as error:
        picker.desk.counters.add("reloads_total", label="refused")
        log.error("the settings stay as they were: %s", error)
        return
    picker.desk.counters.add("reloads_total", label="taken")
    if fixed:
        log.warning("changed settings that wait for a restart: %s", ", ".join(fixed))
    log.info("settings taken up")


async def serve(
    read: Callable[[], Settings],
    file: Path | None,
    say: Callable[[str], None],
    read_keys: Callable[[Path], KeyRing],
    started: Callable[[EndpointPicker], None],
) -> None:
    """Run until SIGTERM or SIGINT. SIGHUP, or a change of ``file``, reads anew.

    Raises:
        SkyMemoryError: an address cannot be bound, or what is set up cannot be meant.
    """
    settings = read()
    key_file = settings.replicas.keys
    picker = endpoint_picker(settings, say, None if key_file is None else read_keys(key_file))
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: reload(picker, read))
    following = None if file is None else asyncio.create_task(follow(file, lambda: reload(picker, read)))
    try:
        await picker.run(stop, lambda: started(picker))
    finally:
        await ended([following])
