"""The cross-entropy of a large vocabulary without ever holding all its logits: a part of the rows at a time."""

from __future__ import annotations

from typing import Any

import torch

_ROWS = 512  # 512 x 8192 float32 logits are 16 MB: about what the processor's caches hold


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy (nats) of ``hidden @ weight.T`` against ``targets``; gradients are made with the loss.

    ``hidden`` (rows, width) and ``weight`` (vocabulary, width) are multiplied in bfloat16, the sums are float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss; keeps both gradients for ``backward``."""
        rows = len(hidden)
        narrow_hidden, narrow_weight = hidden.bfloat16(), weight.bfloat16()
        grad_hidden, grad_weight = torch.empty_like(narrow_hidden), torch.zeros_like(weight)
        total = torch.zeros(())
        for start in range(0, rows, _ROWS):
            part, wanted = narrow_hidden[start : start + _ROWS], targets[start : start + _ROWS, None]
            logits = (part @ narrow_weight.T).float()
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += (normaliser - logits.gather(1, wanted)).sum()
            if not any(ctx.needs_input_grad):
                continue
            error = logits.sub_(normaliser).exp_()  # the probabilities, less one at what was to be said
            error.scatter_add_(1, wanted, torch.full(wanted.shape, -1.0))
            error = error.bfloat16()
            grad_hidden[start : start + _ROWS] = error @ narrow_weight
            grad_weight += error.T @ part
        ctx.save_for_backward(grad_hidden.to(hidden.dtype).div_(rows), grad_weight.div_(rows))
        return total / rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        """The gradients made by ``forward``, times ``grad``."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None
