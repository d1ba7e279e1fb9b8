"""Every family by every use, as the reference page has it: `python -m tests.engine.matrix > docs/reference/models.md`.

In each cell the tokens are those without a cache, in both of transformers' portable attention implementations, or the
program ends. What the cell says is the smaller share of the prompt's full blocks that came from the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tests.engine.families import FAMILIES, build

from skymemory import KVCManager
from skymemory.engine.inputs import shipped_document
from skymemory.engine.tokenizer import train_tokenizer

BLOCK = 8
NEW = 10
IMPLEMENTATIONS = ("sdpa", "eager")
_HEAD = """# Models and uses

Small random models of each family's own configuration class, in float32, greedy where nothing else is said: every cell
was generated with the cache and without it, and the tokens were the same, with `sdpa` and with `eager` attention as
far as the family has both. The figure is the share of a prompt's full blocks that came from the cache. Families of
other models are served if they pass the probe at construction. transformers {version}; `make models-page` writes this
page, and the slow tests compare it.

"""

Use = Callable[["Tried"], tuple[Any, Any, float]]


class Tried:
    """One model, a prompt of it, and a manager that has stored the prompt."""

    def __init__(self, model: Any, tokenizer: Any, kvc: KVCManager) -> None:
        self.model, self.tokenizer, self.kvc = model, tokenizer, kvc
        self._unused = 0
        self.text = shipped_document()[:400]
        self.ids = torch.tensor([tokenizer(self.text)["input_ids"]])
        kvc.add_blocks(self.text)

    def answer(self, ids: Any, cache: Any = None, **options: Any) -> list[list[int]]:
        torch.manual_seed(5)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
        said: list[list[int]] = self.model.generate(ids, past_key_values=cache, **options).tolist()
        return said

    def both(self, ids: Any, **options: Any) -> tuple[Any, Any, float]:
        without = self.answer(ids, **options)
        cache = self.kvc.get_cache(self.text)
        return without, self.answer(ids, cache, **options), self.share()

    def share(self) -> float:
        """Of the full blocks that the last prompt has, those that came; what the guard took back does not count."""
        last, before = self.kvc.last, self._unused
        self._unused = self.kvc.counters.total("unused_tokens_total")
        return max(0.0, last.cached_tokens - (self._unused - before)) / max(1, last.blocks * BLOCK)


def different_prompts(tried: Tried) -> tuple[Any, Any, float]:
    ids = tried.ids.repeat(2, 1)
    ids[1, ids.shape[1] * 3 // 4 :] = tried.ids[0, 5]
    return tried.both(ids)


def chat(tried: Tried) -> tuple[Any, Any, float]:
    turn, shares, without, said = tried.ids, [], [], []
    for _ in range(5):
        without.append(tried.answer(turn))
        said.append(tried.answer(turn, tried.kvc.get_cache(turn)))
        shares.append(tried.share())
        turn = torch.cat([torch.tensor(said[-1]), tried.ids[:, : 2 * BLOCK]], dim=1)
        tried.kvc.add_blocks(said[-1])
    return without, said, min(shares[1:])


class Streamed:
    """What a streamer is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def streamer(tried: Tried) -> tuple[Any, Any, float]:
    without, streamed = Streamed(), Streamed()
    tried.answer(tried.ids, streamer=without)
    tried.answer(tried.ids, tried.kvc.get_cache(tried.text), streamer=streamed)
    return without.tokens, streamed.tokens, tried.share()


def pipeline(tried: Tried) -> tuple[Any, Any, float]:
    pipe = transformers.pipeline("text-generation", model=tried.model, tokenizer=tried.tokenizer)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    without = pipe(tried.text, **options)
    return without, pipe(tried.text, past_key_values=tried.kvc.get_cache(tried.text), **options), tried.share()


USES: dict[str, Use] = {
    "greedy": lambda tried: tried.both(tried.ids),
    "sampled": lambda tried: tried.both(tried.ids, do_sample=True),
    "beams": lambda tried: tried.both(tried.ids, num_beams=3),
    "equal prompts": lambda tried: tried.both(tried.ids.repeat(3, 1)),
    "different prompts": different_prompts,
    "five turns": chat,
    "streamer": streamer,
    "pipeline": pipeline,
}


def row(name: str) -> str:
    """A family's line of the page. Raises AssertionError where a cell's tokens differ."""
    tokenizer = train_tokenizer(1024)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    worst = dict.fromkeys(USES, 1.0)
    for implementation in IMPLEMENTATIONS:
        model = build(name)
        try:
            model.set_attn_implementation(implementation)
        except ValueError:  # this family has the other one only
            continue
        for use, run in USES.items():
            with KVCManager(model, tokenizer, block_tokens=BLOCK) as kvc:
                without, said, share = run(Tried(model, tokenizer, kvc))
            assert said == without, f"{name}, {use}, {implementation}: other tokens than without a cache"
            worst[use] = min(worst[use], share)
    return f"| {name} | " + " | ".join(f"{share:.0%}" for share in worst.values()) + " |"


def main() -> None:
    print(_HEAD.format(version=transformers.__version__), end="")
    print("| family | " + " | ".join(USES) + " |\n| --- |" + " --- |" * len(USES))
    for name in FAMILIES:
        print(f"{name} …", file=sys.stderr)
        print(row(name))


if __name__ == "__main__":
    main()
