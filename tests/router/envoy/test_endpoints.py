"""Which endpoints there are: how they are written, read again, and what the fleet makes of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from skymemory.errors import InvalidInput
from skymemory.router.envoy.endpoints import FileSource, NameSource, SettingsSource, completed, parse_endpoint
from skymemory.router.settings import Backend, PickerSettings


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
    reported = completed(second, PickerSettings(events_port=5000, replay_port=5001, model="m"))
    assert (reported.events, reported.replay, reported.models) == ("tcp://10.0.0.2:5000", "tcp://10.0.0.2:5001", ("m",))
    reported = completed(first, PickerSettings(events_port=5000, replay_port=5001, model="m"))
    assert (reported.events, reported.replay, reported.models) == ("tcp://10.0.0.1:5557", "", ("a", "b")), (
        "its own word stands"
    )
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
        path.write_text("10.0.0.4:80\n")
        with patch("skymemory.router.envoy.endpoints.read_text", side_effect=OSError(5, "Input/output error")):
            assert await source.endpoints() is None
        assert names(await source.endpoints()) == ["10.0.0.4:80"], "read again, although it has not changed"
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
    for name_and_port in ("localhost", "localhost:²"):
        with pytest.raises(InvalidInput, match="NAME:PORT"):
            NameSource(name_and_port, print)
