"""One small model and tokenizer for all engine tests, on a single thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from skymemory.engine.tokenizer import train_tokenizer

    return train_tokenizer(1024)


@pytest.fixture(scope="session")
def document() -> str:
    from skymemory.engine.inputs import shipped_document

    return shipped_document()


@pytest.fixture(scope="session")
def model() -> Any:
    from skymemory.engine.models import build_small

    return build_small()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:The given (buffer|NumPy array) is not writable")
