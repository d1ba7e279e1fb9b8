"""A real Envoy, the endpoint picker, a sidecar beside the decode engine, and an engine that prefills: processes all."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("transformers", reason="an engine needs skymemory[hf]")
pytest.importorskip("envoy", reason="the endpoint picker needs skymemory[envoy]")
pytest.importorskip("redis", reason="the store daemon's clients need skymemory[redis]")

from tests.end_to_end.envoy import ask, envoy_binary, running_envoy, running_picker
from tests.end_to_end.test_handover import ask as ask_engine
from tests.end_to_end.test_handover import cluster, metric, prompts, short, text  # noqa: F401
from tests.router.processes import router

from skymemory.router.envoy.config import Entrance, bootstrap

try:
    envoy_binary()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@contextmanager
def sidecar(engine: str, handover: str) -> Iterator[str]:
    """Run a sidecar; yield its address, as Envoy names endpoints."""
    settings = f'[sidecar]\nengine = "{engine}"\n[disaggregation]\nhandover = "{handover}"'
    with router(settings=settings) as (_, port):
        yield f"127.0.0.1:{port}"


@contextmanager
def apart(folder: Path, tmp_path: Path, handover: str, split_from: str = "0") -> Iterator[dict[str, Any]]:
    """Engines, sidecar, picker and Envoy; ``port`` is Envoy's."""
    with cluster(folder) as made:
        p, d = urlsplit(made["p_url"]).netloc, made["d_url"]
        with sidecar(d, handover) as at:
            words = ("--endpoint", at, "--prefill", p, "--metrics-listen", "127.0.0.1:0")
            settings = f"picker.tell_decisions = true\ndisaggregation.split_from = {split_from}"
            with running_picker(*words, settings=settings) as picker:
                entrance = Entrance("apart", f"127.0.0.1:{picker.port}", endpoints=(at,))
                with running_envoy(bootstrap([entrance]), tmp_path / "run") as envoy:
                    yield {**made, "port": envoy.ports["apart"], "sidecar": at, "p_at": p, "picker": picker}


def completion(ids: list[int], **more: Any) -> bytes:
    return json.dumps({"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}).encode()


@pytest.mark.parametrize("handover", ["after", "overlap"])
def test_prompts_are_prefilled_where_the_picker_says_and_answered_by_the_other(
    short: Path,  # noqa: F811
    tmp_path: Path,
    handover: str,
) -> None:
    with apart(short, tmp_path, handover) as made, ThreadPoolExecutor(4) as pool:
        some = prompts(24, seed=3)
        headers = {"x-skymemory-decision": "1", "x-prefiller-host-port": "127.0.0.1:1"}
        answers = list(
            pool.map(lambda ids: ask(made["port"], "/v1/completions", completion(ids), headers=headers), some)
        )
        assert [answer.status for answer in answers] == [200] * len(some), "a client's own header is not followed"
        for ids, answer in zip(some, answers, strict=True):
            body = json.loads(answer.body)
            assert text(body) == text(ask_engine(made["alone"], ids, 8))
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == min(len(ids) // 16 * 16, len(ids) - 1)
            chosen = json.loads(answer.headers["x-skymemory-decision"])
            assert (chosen["server"], chosen["decode"]["server"]) == (made["p_at"], made["sidecar"])
        assert metric(made["d_url"], "skymemory:remote_prefill_requests_total") == len(some)
        page = ask(made["picker"].port_after("metrics at"), "/metrics").body.decode()
        assert f'skymemory_epp_prefill_picks_total{{server="{made["p_at"]}"}} {len(some):.1f}' in page
        for name in (made["p_at"], made["sidecar"]):
            assert f'skymemory_epp_server_requests{{server="{name}"}} 0.0' in page


def test_a_prefill_engine_that_is_killed_costs_no_answer(short: Path, tmp_path: Path) -> None:  # noqa: F811
    with apart(short, tmp_path, "overlap") as made, ThreadPoolExecutor(3) as pool:
        some = [list(range(10 * at + 3, 10 * at + 700)) for at in range(9)]
        going = [pool.submit(ask, made["port"], "/v1/completions", completion(ids)) for ids in some]
        going[1].result()
        made["p"].kill()
        for ids, one in zip(some, going, strict=True):
            answer = one.result()
            assert answer.status == 200, answer.body
            assert text(json.loads(answer.body)) == text(ask_engine(made["alone"], ids, 8))


def test_a_stream_comes_through_and_a_client_that_leaves_frees_all(short: Path, tmp_path: Path) -> None:  # noqa: F811
    with apart(short, tmp_path, "after") as made:
        ids = list(range(3, 500))
        connection = http.client.HTTPConnection("127.0.0.1", made["port"], timeout=60)
        connection.request("POST", "/v1/completions", completion(ids, stream=True))
        events = [line for line in connection.getresponse() if line.startswith(b"data: ")]
        connection.close()
        assert events[-1].strip() == b"data: [DONE]" and len(events) == 9
        for number in range(6):
            leaving = socket.create_connection(("127.0.0.1", made["port"]))
            body = completion(list(range(number, number + 900)), stream=True)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            leaving.sendall(head.encode() + body)
            leaving.close()
        assert ask(made["port"], "/v1/completions", completion(ids[:100])).status == 200
        for url in (made["p_url"], made["d_url"]):
            assert eventually(lambda url=url: metric(url, "vllm:num_requests_running") == 0)  # type: ignore[misc]


def eventually(holds: Any, patience_s: float = 60.0) -> bool:
    import time

    ends_s = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.1)
    return True


def test_short_prompts_and_next_turns_name_no_prefill_engine(short: Path, tmp_path: Path) -> None:  # noqa: F811
    with apart(short, tmp_path, "after", "64") as made:
        talk = list(range(3, 403))
        for end in (400, 400, 380, 20):
            answer = ask(made["port"], "/v1/completions", completion(talk[:end]))
            assert text(json.loads(answer.body)) == text(ask_engine(made["alone"], talk[:end], 8))
        assert metric(made["d_url"], "skymemory:remote_prefill_requests_total") == 1
        page = ask(made["picker"].port_after("metrics at"), "/metrics").body.decode()
        assert "skymemory_epp_two_steps_total 1.0" in page
        assert 'skymemory_epp_alone_total{reason="few-tokens"} 3.0' in page
