"""LMCache's multi-process storage over a store daemon: one process stores by its manager, another prefetches by its."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.engines.sides import PYTHON, Side
from tests.engines.test_plugins import IMPATIENT, STORES, daemon, socket_of

from skymemory.native import crc32
from skymemory.store.redis import NAMESPACE, RedisStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="the engines could not be installed: see make test-engines"),
]
COUNT = 6


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    logs = tmp_path_factory.mktemp("logs")
    started = Side("lmcache_l2_side", logs / "one"), Side("lmcache_l2_side", logs / "other")
    try:
        yield started
    finally:
        for one in started:
            one.close()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with daemon(STORES[getattr(request, "param", "daemon")], tmp_path) as address:
        yield address


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_what_one_server_stores_another_prefetches(both: tuple[Side, Side], store: str) -> None:
    one, other = both
    said = one.ask("store", store)
    assert said["stored"] == COUNT and said["used"] > 0 and said["healthy"], said
    said = other.ask("load", store)
    assert said["loaded"] == [True] * COUNT and said["equal"], said
    assert one.ask("store", store)["stored"] == COUNT, "they are there already"


@pytest.mark.parametrize(
    "more",
    [
        *({"model": "large"}, {"rank": 1}, {"group": 1}, {"salt": "tenant"}, {"options": {"weights": "revision 2"}}),
        *({"dtype": "bfloat16"}, {"dtype": "int32"}, {"chunk": 32}),
    ],
    ids=str,
)
def test_others_load_nothing_of_it(both: tuple[Side, Side], store: str, more: dict[str, Any]) -> None:
    one, other = both
    assert one.ask("store", store)["stored"] == COUNT
    said = other.ask("load", store, **more)
    assert said["loaded"] == [False] * COUNT, said


@pytest.mark.parametrize("store", ["daemon", "host"], indirect=True)
def test_a_prefix_ends_before_a_damaged_object(both: tuple[Side, Side], store: str) -> None:
    one, other = both
    keys = one.ask("store", store)["keys"]
    key, door = bytes.fromhex(keys[3]), socket_of(store)
    with RedisStore(f"unix://{door}") as bytes_of, Redis(unix_socket_path=door) as client:
        (value,) = (bytearray(value or b"") for value in bytes_of.get_many([key]))
        value[-1] ^= 1
        client.set(NAMESPACE + key, bytes(value) + b"SKV1" + crc32(value, crc32(key)).to_bytes(4, "little"))
    said = other.ask("load", store)
    assert said["loaded"] == [True] * 3 + [False] * 3 and said["equal"], said
    assert one.ask("store", store)["stored"] == COUNT
    assert other.ask("load", store)["loaded"] == [True] * COUNT, "it was stored again"


def test_a_store_that_does_not_answer_is_a_miss(both: tuple[Side, Side]) -> None:
    _, other = both
    said = other.ask("load", "unix:///nowhere", options=IMPATIENT)
    assert said["loaded"] == [False] * COUNT and said["seconds"] < 5, said


def test_without_an_owner_the_error_names_the_command(both: tuple[Side, Side]) -> None:
    error = both[0].ask("load", "host:///nowhere")["error"]
    assert "no owner answers" in error and "skymemory store serve 'host://SIZE" in error


@pytest.mark.parametrize("store", ["daemon", "host"], indirect=True)
def test_deleted_objects_are_gone_and_count_no_more(both: tuple[Side, Side], store: str) -> None:
    one, other = both
    said = one.ask("store", store, delete=True)
    assert said["used"] > 0 and said["after"] == 0
    assert other.ask("load", store)["loaded"] == [False] * COUNT


def test_a_lookup_without_an_answer_says_not_that_objects_are_gone(both: tuple[Side, Side], store: str) -> None:
    said = both[0].ask("store", store, unanswered=True)
    assert said["used"] > 0 and said["stored"] == COUNT


def test_an_object_that_one_rank_lacks_costs_what_is_behind_it_alone(both: tuple[Side, Side], store: str) -> None:
    """LMCache loads the objects of all ranks at once, one rank's behind the other's."""
    one, other = both
    keys = one.ask("store", store, rank=0)["keys"]
    assert one.ask("store", store, rank=1)["stored"] == COUNT
    with RedisStore(store) as values:
        values.delete([bytes.fromhex(keys[3])])
    said = other.ask("load", store, rank=0, others=[1])
    assert said["loaded"] == [True] * 3 + [False] * 3 and said["equal"], said


def test_bytes_without_a_type_are_refused_and_of_two_types_do_not_meet(both: tuple[Side, Side], store: str) -> None:
    one, other = both
    said = one.ask("store", store, dtype="uint8")
    assert (said["stored"], said["refused"]) == (0, COUNT), said
    for kv_dtype in ("fp8_e4m3", "fp8_e5m2"):
        assert one.ask("store", store, dtype="uint8", options={"kv_dtype": kv_dtype})["stored"] == COUNT
        said = other.ask("load", store, dtype="uint8", options={"kv_dtype": "fp8_e4m3"})
        assert said["loaded"] == [True] * COUNT and said["equal"], said
    assert other.ask("load", store, dtype="uint8")["loaded"] == [False] * COUNT
    assert other.ask("load", store, dtype="uint8", options={"kv_dtype": "fp8"})["loaded"] == [False] * COUNT


def test_wrong_options_say_what_to_do(both: tuple[Side, Side], store: str) -> None:
    one, _ = both
    assert "weights is missing" in one.ask("load", store, options={"weights": ""})["error"]
    assert "adapter_params" in one.ask("load", store, options={"wieghts": "1"})["error"]
