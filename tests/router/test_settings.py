"""Settings from files and flags: what is written is read, and what is not known is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymemory.config import known_keys
from skymemory.errors import InvalidInput
from skymemory.router.settings import Backend, Settings, read_settings, settings_from

FILE = """
listen = "127.0.0.1:9000"
strategy = "approximate"
drain = "5s"

[options]
blocks_per_server = 1000

[limits]
max_body = "1MiB"

[timeouts]
first_byte = "2min"
idle = 7

[health]
failures = 5

[[backends]]
url = "http://127.0.0.1:8001/"
models = ["small"]

[[backends]]
url = "http://[::1]:8002"
name = "second"
drain = true
"""


def test_a_file_says_it_all(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(FILE)
    settings = read_settings(file)
    assert settings.backends == (
        Backend("http://127.0.0.1:8001", "127.0.0.1:8001", ("small",)),
        Backend("http://[::1]:8002", "second", drain=True),
    )
    assert (settings.listen, settings.strategy, settings.drain_s) == ("127.0.0.1:9000", "approximate", 5.0)
    assert (settings.limits.max_body_bytes, settings.timeouts.first_byte_s, settings.timeouts.idle_s) == (
        1 << 20,
        120.0,
        7.0,
    )
    assert settings.health.failures == 5 and settings.health.successes == 2
    assert settings.options == {"blocks_per_server": 1000}


def test_flags_come_before_the_file_and_join_its_tables(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(FILE)
    flags = {"strategy": "radix", "limits": {"max_in_flight": 7}, "backends": [{"url": "http://a:1"}]}
    settings = read_settings(file, flags)
    assert settings.strategy == "radix" and settings.listen == "127.0.0.1:9000"
    assert (settings.limits.max_in_flight, settings.limits.max_body_bytes) == (7, 1 << 20)
    assert [backend.name for backend in settings.backends] == ["a:1"]


def test_every_setting_has_a_key_and_a_sentence() -> None:
    for kind in (Backend, Settings, *(type(getattr(Settings(), name)) for name in ("limits", "timeouts", "health"))):
        for key, field in known_keys(kind).items():
            assert field.metadata["says"] and field.name.startswith(key), key


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"backend": []}, "did you mean 'backends'"),
        ({"limits": {"max_boby": 1}}, "limits: max_boby: unknown setting; did you mean 'max_body'"),
        ({"limits": {"max_body": "many"}}, "limits: max_body: 'many' is not a size"),
        ({"limits": {"max_in_flight": True}}, "expected a whole number"),
        ({"limits": {"max_in_flight": 0}}, "above 0"),
        ({"limits": 3}, "expected a table"),
        ({"timeouts": {"idle": -1}}, "expected a duration"),
        ({"backends": [{"name": "x"}]}, "number 1: a backend needs its `url`"),
        ({"backends": ["ftp://a:1"]}, "is not the address of a server"),
        ({"backends": ["http://müller:1"]}, "is not the address of a server"),
        ({"backends": ["http://a:99999"]}, "is not the address of a server"),
        ({"backends": ["http://a:"]}, "is not the address of a server"),
        ({"backends": ["http://a:1", "http://a:1/"]}, "two backends are named 'a:1'"),
        ({"backends": "http://a:1"}, "expected [[backends]]"),
        ({"listen": 8080}, "expected text in quotes"),
        ({"health": {"every": 0}}, "must be above 0"),
        ({"replicas": {"peer": ["a:1"]}}, "replicas: peer: unknown setting; did you mean 'peers'?"),
    ],
)
def test_what_is_wrong_is_named(table: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        settings_from(table)
    assert says in str(caught.value)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot read"):
        read_settings(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("listen = ")
    with pytest.raises(InvalidInput, match="not TOML"):
        read_settings(tmp_path / "bad.toml")
