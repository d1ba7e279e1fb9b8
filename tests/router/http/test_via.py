"""Via: each router adds its name, and ends a request that it has seen before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.router.http.scripted_server import scripted
from tests.router.running import Running, until

from skymemory.router.http.connection import Headers
from skymemory.router.http.via import MAX_HOPS, Via
from skymemory.router.settings import settings_from

Run = Callable[..., Running]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nVia: 1.1 last\r\n\r\n{}"


def name_of(running: Running) -> bytes:
    assert running.server is not None
    return running.server.proxy._exchanges.via.name


def test_the_header_is_appended_both_ways(run: Run) -> None:
    with scripted(OK) as server:
        running = run(engines=0, backends=[{"url": server.url}])
        answer = running.complete({"Via": "1.0 first, 1.1 second (a comment)"})
        (head,) = server.heads
    name = name_of(running)
    assert [line for line in head.split(b"\r\n") if line.lower().startswith(b"via")] == [
        b"Via: 1.0 first, 1.1 second (a comment)",
        b"Via: 1.1 " + name,
    ]
    assert answer.headers.get_all("Via") == ["1.1 last", f"1.1 {name.decode()}"]


def test_two_routers_that_name_each_other_end_a_request_with_508(run: Run) -> None:
    first = run(engines=1)
    second = run(engines=0, backends=[{"url": f"http://127.0.0.1:{first.port}", "name": "first"}])

    async def close_the_loop() -> None:
        assert first.server is not None
        first.server.reset(settings_from({"backends": [{"url": f"http://127.0.0.1:{second.port}", "name": "second"}]}))

    first.loop.run(close_the_loop())
    for running in (first, second):
        answer = running.complete()
        assert answer.status == 508 and answer.json["error"]["code"] == "loop_detected", answer.body
        assert "`backends`" in answer.json["error"]["message"]
        assert len(answer.headers.get_all("Via") or []) == 2, "one of each router, on the way back"
    for running in (first, second):
        until(lambda proxy=running.server.proxy: proxy.in_flight == 0)  # type: ignore[union-attr, misc]


@pytest.mark.parametrize(
    ("via", "refused"),
    [
        ([], False),
        ([b"1.1 other"], False),
        ([b"1.1 %s"], True),
        ([b"1.1 other, HTTP/1.1 %s (x)"], True),
        ([b"1.1 other", b"1.0 %s"], True),
        ([b"1.1 %sx"], False),
        ([b"%s other"], False),
        ([b", ".join([b"1.1 other"] * (MAX_HOPS - 1))], False),
        ([b", ".join([b"1.1 other"] * MAX_HOPS)], True),
        ([b"1.1 other"] * MAX_HOPS, True),
        ([b"", b",,"], False),
    ],
)
def test_a_request_that_has_been_here_or_passed_too_many_proxies_is_refused(via: list[bytes], refused: bool) -> None:
    own = Via()
    headers = Headers([(b"Via", line.replace(b"%s", own.name)) for line in via])
    refusal = own.refusal(headers)
    assert (refusal is not None) == refused and (refusal is None or refusal.status == 508)


def test_each_router_has_a_name_of_its_own() -> None:
    assert len({Via().name for _ in range(100)}) == 100
