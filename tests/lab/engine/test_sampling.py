"""The next token: each field against what it says, and all of them at once against a naive twin."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from tests.lab.conftest import torch

from skymemory_lab.engine.generation import Generation, Sampler, Sampling

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def chooser(ids: list[int] | None = None, min_tokens: int = 0, ends: tuple[int, ...] = (), **sampling: Any) -> Sampler:
    prompt = np.array(ids or [3], dtype=np.int64)
    return Sampler(Generation(prompt, 100, Sampling(**sampling), min_tokens=min_tokens), frozenset(ends))


def drawn(count: int = 400, **sampling: Any) -> set[int]:
    one = chooser(seed=1, **sampling)
    return {one.sample(LOGITS) for _ in range(count)}


def test_drawing_keeps_to_the_likeliest_and_to_their_chances() -> None:
    assert chooser(temperature=0).sample(LOGITS) == 0
    for top_p, allowed in ((0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        assert drawn(top_p=top_p) == allowed
    one = chooser(temperature=0.5, seed=1)
    share = sum(one.sample(LOGITS) == 0 for _ in range(2000)) / 2000
    assert share == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.04)


def test_top_k_and_min_p_cut_the_tail_and_top_p_counts_what_is_left() -> None:
    assert drawn(top_k=1) == {0} and drawn(top_k=3) == {0, 1, 2} and drawn(top_k=9) == {0, 1, 2, 3}
    assert drawn(min_p=0.25) == {0, 1, 2} and drawn(min_p=1.0) == {0} and drawn(min_p=0.09) == {0, 1, 2, 3}
    assert drawn(top_k=2, top_p=0.62) == {0}, "of the two that are left the first has 0.625"
    assert drawn(top_k=2, top_p=0.64) == {0, 1}


def test_bias_and_allowed_tokens_decide_what_greedy_takes() -> None:
    assert chooser(temperature=0, logit_bias={3: 5.0}).sample(LOGITS) == 3
    assert chooser(temperature=0, logit_bias={0: -100.0}).sample(LOGITS) == 1
    assert chooser(temperature=0, allowed=frozenset([2, 3])).sample(LOGITS) == 2
    assert drawn(allowed=frozenset([2, 3])) == {2, 3}
    assert torch.equal(LOGITS, torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))), "the model's logits stay as they are"


def test_nothing_ends_an_answer_before_it_has_so_many_tokens() -> None:
    one = chooser(temperature=0, min_tokens=3, ends=(0, 1))
    assert [one.sample(LOGITS) for _ in range(4)] == [2, 2, 2, 0]


def test_penalties_count_the_answer_and_repetition_the_prompt_too() -> None:
    level = torch.zeros(4)
    one = chooser([3], temperature=0, frequency_penalty=1.0, logit_bias={0: 2.5})
    assert [one.sample(level) for _ in range(5)] == [0, 0, 0, 1, 2], "2.5, 1.5 and 0.5 are above 0; the prompt's 3 too"
    one = chooser([3], temperature=0, presence_penalty=1.0, logit_bias={0: 2.5})
    assert [one.sample(level) for _ in range(3)] == [0, 0, 0], "once is as bad as thrice"
    one = chooser([0], temperature=0, repetition_penalty=3.0)
    assert one.sample(torch.tensor([2.0, 1.0, -1.0, -2.0])) == 1
    one = chooser([3], temperature=0, repetition_penalty=3.0)
    assert one.sample(torch.tensor([-4.0, -3.0, -2.5, -1.0])) == 2


@pytest.mark.parametrize("seed", range(20))
def test_all_at_once_is_what_a_naive_twin_says(seed: int) -> None:
    dice = random.Random(seed)
    size, prompt = 30, [dice.randrange(30) for _ in range(12)]
    fields: dict[str, Any] = {
        "presence_penalty": dice.choice([0.0, dice.uniform(-2, 2)]),
        "frequency_penalty": dice.choice([0.0, dice.uniform(-2, 2)]),
        "repetition_penalty": dice.choice([1.0, dice.uniform(0.5, 2)]),
        "logit_bias": {dice.randrange(size): dice.uniform(-5, 5) for _ in range(dice.randrange(4))},
        "allowed": dice.choice([None, frozenset(dice.sample(range(size), 20))]),
    }
    ends, least = (1, 2, 3), dice.randrange(8)
    one = chooser(prompt, least, ends, temperature=0, **fields)
    answer: list[int] = []
    for _ in range(12):
        logits = [dice.gauss(0, 3) for _ in range(size)]
        expected = _naive(logits, prompt, answer, ends if len(answer) < least else (), **fields)
        assert one.sample(torch.tensor(logits, dtype=torch.float64)) == expected
        answer.append(expected)


def _naive(
    logits: list[float],
    prompt: list[int],
    answer: list[int],
    barred: tuple[int, ...],
    presence_penalty: float,
    frequency_penalty: float,
    repetition_penalty: float,
    logit_bias: dict[int, float],
    allowed: frozenset[int] | None,
) -> int:
    """OpenAI's and vLLM's definitions, one token after the other."""
    best, likeliest = -1, -math.inf
    for token, logit in enumerate(logits):
        if token in barred or (allowed is not None and token not in allowed):
            continue
        logit += logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            logit = logit / repetition_penalty if logit > 0 else logit * repetition_penalty
        logit -= frequency_penalty * answer.count(token) + presence_penalty * (token in answer)
        if logit > likeliest:
            best, likeliest = token, logit
    return best
