"""Routers whose servers prefill or decode, and what their books say."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from tests.router.mock_engine import MockEngine
from tests.router.running import PATIENCE_S, Running

from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.router.decoding import DecodeServers

Run = Callable[..., Running]
ROLES = {"p": "prefill", "d": "decode", "b": "both"}
PROMPT = "abcd" * 40


def start(
    run: Run, roles: str = "pd", may_change: bool = False, engine_type: type[MockEngine] = MockEngine, **settings: Any
) -> Running:
    """A router before engines p0, d0 and so on, by the letters of ``roles``; ``may_change``: they are elastic. Every
    prompt takes two steps, unless the settings say from how many tokens on.
    """
    running = run(engines=0)
    running.close_server()
    for letter in roles:
        engine = engine_type(f"{letter}{sum(each.name[0] == letter for each in running.engines)}")
        running.loop.run(engine.start())
        running.engines.append(engine)
    backends = [{"url": each.url, "name": each.name, "role": ROLES[each.name[0]]} for each in running.engines]
    if may_change:
        backends = [{**each, "elastic": True} for each in backends]
    apart = {"split_from": 0, **settings.pop("disaggregation", {})}
    running.restart(**{"backends": backends, "disaggregation": apart, **settings})
    return running


def engine(running: Running, name: str) -> MockEngine:
    return next(each for each in running.engines if each.name == name)


def release(running: Running, name: str) -> None:
    running.loop.loop.call_soon_threadsafe(engine(running, name).release.set)


def bodies(running: Running, name: str) -> list[dict[str, Any]]:
    """Of the requests that this engine has seen."""
    return [json.loads(each["body"]) for each in engine(running, name).seen]


def books_are_closed(running: Running) -> bool:
    """No server of either fleet has a request in flight."""
    assert running.server is not None
    scheduler = running.server.scheduler
    assert scheduler.decode is not None
    servers = [*scheduler.prefill.fleet, *scheduler.decode.fleet]
    if any((each.in_flight, each.prefilling, each.prefill_tokens) != (0, 0, 0.0) for each in servers):
        return False
    assert isinstance(scheduler.decode.scorer, DecodeServers)
    if len(scheduler.decode.scorer._notes):
        return False
    decoding = scheduler.decode.scorer.ranking
    return not isinstance(decoding, LeastTbt) or no_batch_is_open(decoding)


def no_batch_is_open(decoding: LeastTbt) -> bool:
    counts = [
        (each.joined, each.promised, each.joined_tokens, each.promised_tokens) for each in decoding._batches.values()
    ]
    return not decoding._open and not decoding._expected and all(each == (0, 0, 0, 0) for each in counts)


def sent(running: Running, body: dict[str, Any], headers: bytes = b"") -> socket.socket:
    """A connection with a request on its way."""
    data = json.dumps(body).encode()
    raw = socket.create_connection(("127.0.0.1", running.port), PATIENCE_S)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (headers, len(data))
    raw.sendall(head + data)
    return raw
