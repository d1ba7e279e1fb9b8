"""Which endpoints there are: how they are written, read again, and what the fleet makes of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skymemory.conductor.fleet import Fleet, Server
from skymemory.conductor.picker import Picker
from skymemory.conductor.strategies.plain import InTurn
from skymemory.errors import InvalidInput
from skymemory.router.desk import NO_PROMPT
from skymemory.router.ejection import Ejection
from skymemory.router.endpoints import FileSource, NameSource, SettingsSource, completed, endpoint, parse_endpoint
from skymemory.router.endpoints_known import Endpoints
from skymemory.router.picker_settings import PickerSettings
from skymemory.router.settings import Backend


@pytest.mark.parametrize(
    ("text", "read"), [("127.0.0.1:8001", None), (" [fd00::7]:80 ", "[fd00::7]:80"), ("[FD00:0::7]:80", "[fd00::7]:80")]
)
def test_endpoints_are_read_as_data_planes_write_them(text: str, read: str | None) -> None:
    assert parse_endpoint(text) == (read or text)


@pytest.mark.parametrize(
    "text", ["", "8001", "localhost:80", "1.2.3.4", "1.2.3.4:0", "1.2.3.4:65536", "::1:80", "[1.2.3.4]:80", "1.2.3.4:x"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected"):
        parse_endpoint(text)


def names(found: Sequence[Backend] | None) -> list[str]:
    assert found is not None
    return [backend.name for backend in found]


def test_a_line_of_the_file_may_say_what_a_backend_says(tmp_path: Path) -> None:
    path = tmp_path / "endpoints"
    path.write_text("10.0.0.1:80 events=tcp://10.0.0.1:5557 models=a,b drain=true\n10.0.0.2:80\n")
    first, second = asyncio.run(FileSource(path, print).endpoints()) or ()
    assert (first.events, first.models, first.drain, second.events) == ("tcp://10.0.0.1:5557", ("a", "b"), True, "")
    told = completed(second, PickerSettings(events_port=5000, replay_port=5001, model="m"))
    assert (told.events, told.replay, told.models) == ("tcp://10.0.0.2:5000", "tcp://10.0.0.2:5001", ("m",))
    told = completed(first, PickerSettings(events_port=5000, replay_port=5001, model="m"))
    assert (told.events, told.replay, told.models) == ("tcp://10.0.0.1:5557", "", ("a", "b")), "its own word stands"
    for line, said in (("port=1", "KEY=VALUE"), ("url=http://x", "KEY=VALUE"), ("drain=perhaps", "true or false")):
        path.write_text(f"10.0.0.1:80 {line}\n")
        with pytest.raises(InvalidInput, match=f"line 1: .*{said}"):
            FileSource(path, print)


def test_backends_of_the_settings_are_called_by_their_address() -> None:
    source = SettingsSource([Backend("http://10.0.0.1:80", name="first"), Backend("http://[fd00::7]:80")])
    assert names(asyncio.run(source.endpoints())) == ["10.0.0.1:80", "[fd00::7]:80"]
    with pytest.raises(InvalidInput, match="http://IP:PORT"):
        source.set([Backend("http://10.0.0.1:80/under")])
    assert len(names(asyncio.run(source.endpoints()))) == 2


def test_a_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        path, said = tmp_path / "endpoints", list[str]()
        path.write_text("10.0.0.1:80  # the first\n\n# none\n10.0.0.2:80\n10.0.0.1:80\n")
        source = FileSource(path, said.append)
        assert names(await source.endpoints()) == ["10.0.0.1:80", "10.0.0.2:80"]
        path.write_text("10.0.0.3:80\n")
        assert names(await source.endpoints()) == ["10.0.0.3:80"]
        path.write_text("10.0.0.3:80\nnonsense\n")
        assert await source.endpoints() is None and "line 2" in said[0]
        path.unlink()
        assert await source.endpoints() is None and len(said) == 2
        path.write_text("")
        assert await source.endpoints() == ()

    asyncio.run(run())


def test_a_name_gives_every_address_and_one_that_is_gone_changes_nothing() -> None:
    async def run() -> None:
        said = list[str]()
        found = await NameSource("localhost:8000", said.append).endpoints()
        assert found and set(names(found)) <= {"127.0.0.1:8000", "[::1]:8000"} and not said
        assert await NameSource("no-such-name.invalid:8000", said.append).endpoints() is None and said

    asyncio.run(run())
    with pytest.raises(InvalidInput, match="NAME:PORT"):
        NameSource("localhost", print)


def test_the_fleet_follows_and_keeps_what_it_knows_of_those_that_stay() -> None:
    forgotten: list[str] = []

    class Forgetting(InTurn):
        def forget(self, server: Server) -> None:
            forgotten.append(server.name)

    picker = Picker(Fleet(), Forgetting())
    endpoints = Endpoints(picker)
    assert endpoints.update([endpoint("1.1.1.1:1"), endpoint("1.1.1.2:1")]) == (["1.1.1.1:1", "1.1.1.2:1"], [])
    picker.fleet.servers["1.1.1.2:1"].in_flight = 4
    drains = replace(endpoint("1.1.1.2:1"), drain=True)
    assert endpoints.update([drains, endpoint("1.1.1.3:1")]) == (["1.1.1.3:1"], ["1.1.1.1:1"])
    assert picker.fleet.servers["1.1.1.2:1"].draining and list(endpoints.known) == ["1.1.1.2:1", "1.1.1.3:1"]
    endpoints.update([endpoint("1.1.1.2:1"), endpoint("1.1.1.3:1")])
    assert not picker.fleet.servers["1.1.1.2:1"].draining
    assert {server.name: server.in_flight for server in picker.fleet} == {"1.1.1.2:1": 4, "1.1.1.3:1": 0}
    assert forgotten == ["1.1.1.1:1"]


def test_who_says_which_models_it_serves_gets_no_others() -> None:
    endpoints = Endpoints(Picker(Fleet(), InTurn()))
    french = replace(endpoint("1.1.1.1:1"), models=("m",), adapters=("french",))
    endpoints.update([french, replace(endpoint("1.1.1.2:1"), models=("other",)), endpoint("1.1.1.3:1")])

    def asked(model: str, adapter: str = "") -> set[str] | None:
        found = endpoints.serving(replace(NO_PROMPT, model=model, adapter=adapter))
        return None if found is None else {name.split(":")[0][-1] for name in found}

    assert asked("m") == {"1", "3"} and asked("other") == {"2", "3"} and asked("m", "french") == {"1", "3"}
    assert asked("nobody's") is None and endpoints.adapters == {"french"}


def test_ejection_needs_failures_in_a_row_and_never_takes_the_last() -> None:
    fleet = Fleet()
    for name in "ab":
        fleet.add(name)
    ejection = Ejection(fleet, failures=2, rest_s=5.0)
    assert not ejection.refused("a", 0.0)
    ejection.took("a")
    assert not ejection.refused("a", 0.0) and ejection.refused("a", 0.0) and not fleet.servers["a"].healthy
    assert not ejection.refused("b", 0.0) and not ejection.refused("b", 0.0) and fleet.servers["b"].healthy
    ejection.review(4.9)
    assert not fleet.servers["a"].healthy
    ejection.review(5.0)
    assert fleet.servers["a"].healthy and ejection.refused("a", 6.0)
    ejection.forget("a")
    ejection.review(20.0)
    assert not ejection.refused("nobody", 0.0)
