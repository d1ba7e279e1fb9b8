from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch


class ComputedTokens:
    """Context in which ``passes`` receives the tokens per row of each forward pass; empty without a token embedding."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.passes: list[int] = []
        try:
            self._embedding: torch.nn.Module | None = model.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            self._embedding = None

    @property
    def tokens(self) -> int:
        return sum(self.passes)

    def __enter__(self) -> Self:
        if self._embedding is not None:
            self._hook = self._embedding.register_forward_hook(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._embedding is not None:
            self._hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count(self, module: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        if args and isinstance(args[0], torch.Tensor):
            self.passes.append(int(args[0].shape[-1]))
