"""A real Envoy asks the picker: who gets a request, over plain and TLS, within subsets, with bodies that stream."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.end_to_end.envoy import (
    Envoy,
    Picker,
    Servers,
    a_completion,
    ask,
    envoy_binary,
    running_envoy,
    running_picker,
)

from skymemory.router.envoy.config import Entrance, bootstrap
from skymemory.router.tls import self_signed

try:
    envoy_binary()
except FileNotFoundError as why:
    pytest.skip(f"no real Envoy: {why}", allow_module_level=True)

SUBSETS_FROM_A_HEADER = """
function envoy_on_request(handle)
  local subset = handle:headers():get("x-test-subset")
  if subset == nil then return end
  local list = {}
  for endpoint in string.gmatch(subset, "[^;]+") do table.insert(list, endpoint) end
  handle:streamInfo():dynamicMetadata():set("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", list)
end
"""


@dataclass
class World:
    servers: Servers
    picker: Picker
    envoy: Envoy

    def counted(self, name: str, **labels: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.picker.port_after('metrics at')}/metrics") as page:
            lines = page.read().decode().splitlines()
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        head = f"skymemory_epp_{name}{{{inside}}}" if labels else f"skymemory_epp_{name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == head)

    def settles(self, name: str, value: float, **labels: str) -> None:
        """It comes to ``value`` soon: Envoy reports an end after the client has seen it."""
        end = time.monotonic() + 30
        while (now := self.counted(name, **labels)) != value and time.monotonic() < end:
            time.sleep(0.02)
        assert now == value


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("envoy")
    certificate = self_signed()
    (folder / "cert.pem").write_bytes(certificate.chain)
    (folder / "key.pem").write_bytes(certificate.key)
    (folder / "other.pem").write_bytes(self_signed().chain)
    lua = {"@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"}
    subsets = {
        "name": "envoy.filters.http.lua",
        "typed_config": {**lua, "default_source_code": {"inline_string": SUBSETS_FROM_A_HEADER}},
    }
    with Servers(3) as servers:
        named = [word for endpoint in servers.endpoints for word in ("--endpoint", endpoint)]
        plain = [*named, "--strategy", "round-robin", "--metrics-listen", "127.0.0.1:0"]
        tls = ["--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")]
        quiet = 'health.metrics_path = ""'
        with (
            running_picker(*plain, settings=f"{quiet}\npicker.tell_decisions = true") as picker,
            running_picker(*named, *tls, settings=quiet) as secure,
        ):
            asked, over_tls = f"127.0.0.1:{picker.port}", f"127.0.0.1:{secure.port}"
            ca, other = str(folder / "cert.pem"), str(folder / "other.pem")
            config = bootstrap(
                [
                    Entrance("metadata", asked),
                    Entrance("header", asked, read_from="header"),
                    Entrance("known", asked, endpoints=servers.endpoints),
                    Entrance("subset", asked, filters_before=(subsets,)),
                    Entrance("impatient", asked, upload_s=0.4),
                    Entrance("tls", over_tls, picker_tls=True, picker_ca=ca),
                    Entrance("wrong", over_tls, picker_tls=True, picker_ca=other),
                ]
            )
            _with_trailers(config)
            with running_envoy(config, folder / "run") as envoy:
                yield World(servers, picker, envoy)


def _with_trailers(config: dict[str, Any]) -> None:
    for listener in config["static_resources"]["listeners"]:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_protocol_options"] = {"enable_trailers": True}


@pytest.mark.parametrize("entrance", ["metadata", "header", "known"])
def test_requests_go_where_the_picker_says(world: World, entrance: str) -> None:
    port = world.envoy.ports[entrance]
    answers = [ask(port, "/v1/completions", a_completion(), {"x-skymemory-decision": "1"}) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    assert Counter(answer.server for answer in answers) == dict.fromkeys(world.servers.endpoints, 2)
    for answer in answers:
        assert json.loads(answer.headers["x-skymemory-decision"])["server"] == answer.server


@pytest.mark.parametrize("entrance", ["metadata", "header", "known"])
def test_a_client_cannot_choose_its_server(world: World, entrance: str) -> None:
    mine = {"x-gateway-destination-endpoint": world.servers.endpoints[0]}
    answers = [ask(world.envoy.ports[entrance], "/v1/models", None, mine) for _ in range(3)]
    assert {answer.server for answer in answers} == set(world.servers.endpoints)


def test_tls_with_the_right_authority_and_not_with_another(world: World) -> None:
    assert ask(world.envoy.ports["tls"], "/v1/completions", a_completion()).status == 200
    assert ask(world.envoy.ports["wrong"], "/v1/completions", a_completion()).status >= 500


def test_subset_hints_are_kept_to(world: World) -> None:
    port, (first, second, third) = world.envoy.ports["subset"], world.servers.endpoints
    two = {"x-test-subset": f"{first};{third};9.9.9.9:1"}
    assert {ask(port, "/v1/models", None, two).server for _ in range(4)} == {first, third}
    assert {ask(port, "/v1/models").server for _ in range(3)} == {first, second, third}
    none = ask(port, "/v1/models", None, {"x-test-subset": "9.9.9.9:1"})
    assert none.status == 503 and b"subset" in none.body and none.headers["retry-after"] == "1"


def test_a_large_request_arrives_whole(world: World) -> None:
    body = a_completion("x" * 1_000_000)
    answer = ask(world.envoy.ports["metadata"], "/v1/completions", body)
    assert answer.status == 200
    _, headers, got = world.servers.got[answer.server][-1]
    assert hashlib.sha256(got).digest() == hashlib.sha256(body).digest()
    # Envoy takes the length off bodies that pass a picker: servers must read chunks.
    assert headers["transfer-encoding"] == "chunked" and "content-length" not in headers


def test_a_body_over_the_limit_is_refused(world: World) -> None:
    answer = ask(world.envoy.ports["metadata"], "/v1/completions", a_completion("x" * (17 << 20)))
    assert answer.status == 413 and b"16,777,216" in answer.body


def test_invalid_json_is_refused_and_reaches_no_server(world: World) -> None:
    before = world.servers.requests()
    answer = ask(world.envoy.ports["metadata"], "/v1/completions", b'{"prompt": ')
    assert answer.status == 400 and json.loads(answer.body)["error"]["type"] == "invalid_request_error"
    assert world.servers.requests() == before


def test_a_stream_of_events_comes_as_it_is_and_as_it_is_made(world: World) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", world.envoy.ports["metadata"], timeout=10)
    connection.request("POST", "/v1/completions", a_completion(stream=True))
    answer = connection.getresponse()
    began = time.monotonic()
    first = answer.readline()
    to_first_s = time.monotonic() - began
    rest = answer.read()
    to_end_s = time.monotonic() - began
    connection.close()
    assert answer.getheader("content-type") == "text/event-stream"
    assert first == b'data: {"choices": [{"text": "0"}]}\n' and rest.endswith(b"\n\ndata: [DONE]\n\n")
    assert (first + rest).count(b"data: ") == 7
    # Five events 50 ms apart: held back until the end they would come at once.
    assert to_end_s - to_first_s > 0.15


def test_cached_tokens_are_read_as_answers_pass(world: World) -> None:
    before = world.counted("cached_tokens_total"), world.counted("told_prompt_tokens_total")
    ask(world.envoy.ports["metadata"], "/v1/completions", a_completion())
    ask(world.envoy.ports["metadata"], "/v1/completions", a_completion(stream=True))
    world.settles("cached_tokens_total", before[0] + 4 + 8)
    world.settles("told_prompt_tokens_total", before[1] + 10 + 8)


def test_a_slow_upload_is_waited_for(world: World) -> None:
    body = a_completion()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", world.envoy.ports["metadata"]), timeout=10) as client:
        client.sendall(head.encode() + body[:5])
        # Envoy's clock for messages to a picker is 200 ms; with full-duplex bodies it must not run.
        time.sleep(0.6)
        client.sendall(body[5:])
        assert client.recv(64).startswith(b"HTTP/1.1 200")


def test_trailers_of_a_request_pass(world: World) -> None:
    body = a_completion()
    sent = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    sent += b"%x\r\n%s\r\n0\r\nx-checksum: 7\r\n\r\n" % (len(body), body)
    before = world.servers.requests()
    with socket.create_connection(("127.0.0.1", world.envoy.ports["metadata"]), timeout=10) as client:
        client.sendall(sent)
        assert client.recv(64).startswith(b"HTTP/1.1 200")
    assert world.servers.requests() == before + 1


@pytest.mark.brief()
def test_a_client_that_goes_away_in_mid_stream_leaves_nothing_behind(world: World) -> None:
    with socket.create_connection(("127.0.0.1", world.envoy.ports["metadata"]), timeout=10) as client:
        body = a_completion(stream=True)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        assert b"200" in client.recv(4096)
        world.settles("streams", 1)
    world.settles("streams", 0)
    for endpoint in world.servers.endpoints:
        world.settles("server_requests", 0, server=endpoint)


@pytest.mark.brief()
def test_a_client_that_hangs_in_its_upload_is_not_routed(world: World) -> None:
    before = world.servers.requests()
    with socket.create_connection(("127.0.0.1", world.envoy.ports["metadata"]), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        world.settles("streams", 1)
    world.settles("streams", 0)
    assert world.servers.requests() == before


@pytest.mark.slow
@pytest.mark.seeded
def test_an_upload_that_does_not_end_is_cut_off(world: World) -> None:
    with socket.create_connection(("127.0.0.1", world.envoy.ports["impatient"]), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert client.recv(64).startswith(b"HTTP/1.1 408")
        world.settles("streams", 0)
