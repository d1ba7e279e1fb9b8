"""Routers in front of engines, closed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.router.running import Loop, Running


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def run(loop: Loop) -> Iterator[Callable[..., Running]]:
    """``run(engines=3, **settings)``: a router in front of so many engines."""
    made: list[Running] = []

    def start(engines: int = 3, **settings: object) -> Running:
        running = Running(loop)
        made.append(running)
        return running.start(engines, **settings)

    yield start
    for running in made:
        running.close()
