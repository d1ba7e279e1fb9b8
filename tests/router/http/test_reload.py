"""Changed settings: what is taken up without a restart, and what says that it waits for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.router.running import Running, until

from skymemory.router.settings import settings_from


def test_what_a_reload_takes_up_and_what_it_says_waits(
    run: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    running = run(engines=1, health={"metrics_every": 1000.0})
    server, engine = running.server, running.engines[0]
    assert server is not None
    until(lambda: server.picker.fleet.servers["e0"].reported is not None)
    engine.waiting = 5

    async def reset(**sections: object) -> None:
        backends = [{"url": engine.url, "name": "e0"}]
        server.reset(
            settings_from({"listen": "127.0.0.1:0", "strategy": "least-load", "backends": backends, **sections})
        )

    running.loop.run(
        reset(limits={"max_body": 3000}, timeouts={"connect": 0.7, "keep_alive": 3}, health={"metrics_every": 0.05})
    )
    until(lambda: server.picker.fleet.servers["e0"].reported.waiting == 5)
    assert running.complete(prompt="x" * 4000).status == 413 and running.complete(prompt="x" * 2000).status == 200
    assert server.pools["e0"].connect_s == 0.7
    assert "need a restart" not in caplog.text
    assert server.proxy.keep_alive_s == 3
    running.loop.run(reset(limits={"max_body": 1 << 25}, health={"metrics_path": ""}))
    assert running.complete(prompt="x" * (17 << 20)).status == 200, "the reader of prompts takes it too"
    assert not server._health._metrics.watched
