"""Two servers for all of these tests, started together: that takes as long as one, where there are two cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.vllm.server import Vllm, an_adapter


@pytest.fixture(scope="session")
def servers() -> Iterator[tuple[Vllm, Vllm]]:
    """The first has an adapter, ``sql``."""
    with TemporaryDirectory(prefix="sky-vllm-") as folder:
        adapter = an_adapter(Path(folder) / "sql")
        lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", f"sql={adapter}")
        both = (Vllm(Path(folder), "one", *lora), Vllm(Path(folder), "two"))
        try:
            for each in both:
                each.start()
            for each in both:
                each.wait()
            yield both
        finally:
            for each in both:
                each.stop()


@pytest.fixture
def vllm(servers: tuple[Vllm, Vllm]) -> Vllm:
    return servers[0]
