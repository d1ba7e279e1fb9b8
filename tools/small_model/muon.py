"""Muon: momentum whose every matrix step is made orthogonal (Jordan et al. 2024), which learns from few tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's quintic: drives every singular value near 1 in five rounds


def orthogonalise(matrix: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """Nearly the nearest matrix with all singular values 1: they become 0.7 to 1.2, tiny ones less.

    By Newton-Schulz rounds in bfloat16.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = (x / (x.norm() + 1e-7)).bfloat16()
    for _ in range(rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).float()


class Muon(torch.optim.Optimizer):
    """For weight matrices only: step ``lr`` along the orthogonalised Nesterov momentum, with weight decay."""

    def __init__(
        self, matrices: Iterable[torch.Tensor], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step of every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalise(weight.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, weight.size(0) / weight.size(1)) ** 0.5
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
