from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from skymemory.progress import Report


class LayerReports:
    """Hooks on a decoder's layers that report the progress of a generation."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = list(model.get_decoder().layers)
        self._report: Report | None = None
        self._passes = 0
        self._tokens = 1
        self._first_share = 1.0
        for at, layer in enumerate(self._layers, 1):
            layer.register_forward_hook(_LayerHook(self, at))

    @contextmanager
    def to(self, report: Report, tokens: int = 1, first_share: float = 1.0) -> Iterator[None]:
        """Report passes in this context: the prompt's, with ``first_share`` of the time, then a pass per
        further token.
        """
        self._report, self._passes, self._tokens, self._first_share = report, 0, tokens, first_share
        try:
            yield
        finally:
            self._report = None

    def on_layer(self, number: int) -> None:
        layers = len(self._layers)
        if self._report is None:
            return
        # The first pass computes the prompt, each later pass a token.
        if self._passes == 0:
            self._report(number / layers * self._first_share, f"layer {number} of {layers}")
        else:
            later = (self._passes - 1 + number / layers) / max(1, self._tokens - 1)
            share = self._first_share + later * (1 - self._first_share)
            self._report(share, f"token {self._passes + 1} of {self._tokens}")
        self._passes += number == layers


class _LayerHook:
    def __init__(self, reports: LayerReports, number: int) -> None:
        self._reports = reports
        self._number = number

    def __call__(self, *_: object) -> None:
        self._reports.on_layer(self._number)
