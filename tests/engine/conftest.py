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


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy computer stands still for longer than a store is waited for."""
    if request.node.get_closest_marker("impatient") is None:
        monkeypatch.setattr("skymemory.cache.patience.MIN_PATIENCE_S", 5.0)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from skymemory.engine.transformers.models import train_tokenizer

    return train_tokenizer(1024)


@pytest.fixture(scope="session")
def document() -> str:
    from skymemory.engine.inputs import shipped_document

    return shipped_document()


@pytest.fixture(scope="session")
def model() -> Any:
    from skymemory.engine.transformers.models import build_small

    return build_small()


@pytest.fixture(scope="session")
def ids() -> Any:
    """A prompt of twenty blocks and five tokens."""
    return torch.randint(3, 1000, (1, 20 * 16 + 5), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def plain(model: Any, ids: Any) -> list[int]:
    """What the model says to it without a cache."""
    from tests.engine.transformers.generation import tokens_of

    return tokens_of(model, ids)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:The given (buffer|NumPy array) is not writable")
