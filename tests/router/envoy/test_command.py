"""``skymemory epp`` as a process: its settings file is followed, what it learnt is kept, a signal ends it well."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.router.processes import Process

SETTINGS = """
backends = ["http://127.0.0.1:8001", {more}]
strategy = "radix"
state = "{state}"
[health]
metrics_path = ""
[picker]
listen = "127.0.0.1:0"
"""


@pytest.mark.brief()
def test_its_settings_are_followed_and_what_it_knows_is_kept(tmp_path: Path) -> None:
    file, state = tmp_path / "settings.toml", tmp_path / "state"

    def write(more: str) -> None:
        file.write_text(SETTINGS.format(more=more, state=state))

    write("")
    process = Process("-m", "skymemory", "epp", "--settings", str(file))
    try:
        process.says(r"^listening on 127\.0\.0\.1:\d+$")
        process.says("1 endpoints: 1 added, 0 removed")
        write('"http://127.0.0.1:8002"')
        process.says("2 endpoints: 1 added, 0 removed")
        write('"http://127.0.0.1:8002"]\nstrategie = "x"\nnothing = [')
        process.send_signal(signal.SIGHUP)
        process.says("settings not reloaded.*: .*did you mean 'strategy'")
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.ends()
    assert ended == 0 and state.stat().st_size > 0
    process.says("prefix index saved to .*state: [0-9]+ bytes")
    assert not any("Traceback" in line for line in process.said)
