"""Every configuration by every use, as the reference page has it (`make models-page`).

In each cell the tokens are those without a cache, in both of transformers' portable attention implementations, or the
program ends. What the cell says is the smaller share of the prompt's full blocks that came from the cache.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from tests.engine.families import FAMILIES, REFUSED, build, known

from skymemory import KVCManager
from skymemory.engine.inputs import shipped_document
from skymemory.engine.tokenizer import train_tokenizer
from skymemory.errors import UnsupportedModel

BLOCK = 8
NEW = 8
IMPLEMENTATIONS = ("sdpa", "eager")
ROUNDING = {torch.float32: 0.001, torch.float16: 0.05, torch.bfloat16: 0.1}
"""How far logits may differ, in units of their spread: far less than by another token in the prompt's last block."""
_PAGE = """# Models and uses

Small random models of {served} configurations, each of its family's own class, in float32 and greedy where nothing else
is said: every cell was generated with the cache and without it, with `sdpa` and with `eager` attention as far as the
family has both, and the tokens were the same, and so were the logits but for rounding. The figure is the share of the
full blocks computed before that came from the cache. A batch of different prompts is served what all of them begin
with, of models with recurrent states only where they end alike. `torch.compile` is with `backend="eager"`: graphs are
taken and no code is generated; with code, by the default backend, only Llama was tried. Families of other models are
served if they pass the probe at construction. transformers {version}; `make models-page` writes this
page, and the slow tests compare it.

"""
_REFUSED = """
## Refused

At construction, by `UnsupportedModel`, rather than served half right:

| configuration | why |
| --- | --- |
"""

_FIGURES = re.compile(r" \(its next.*?\)| \[.*?\](?=:)")
"""Of an error, what is not the same on each processor, and lists of shapes."""

Said = tuple[list[Any], list[torch.Tensor]]
"""Token ids, and the logits that they were chosen from where these are known."""
Use = Callable[["Tried"], tuple[Said, Said, float]]


class Tried:
    """One model, a prompt of it, and a manager that has stored the prompt."""

    def __init__(self, model: Any, tokenizer: Any, kvc: KVCManager) -> None:
        self.model, self.tokenizer, self.kvc = model, tokenizer, kvc
        self._unused = 0
        self.text = shipped_document()[:400]
        self.ids = torch.tensor([tokenizer(self.text)["input_ids"]])
        kvc.add_blocks(self.text)

    def answer(self, ids: Any, cache: Any = None, **options: Any) -> Said:
        torch.manual_seed(5)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
        if cache is not None:
            options["past_key_values"] = cache
        out = self.model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
        return out.sequences.tolist(), list(out.logits)

    def both(self, ids: Any, **options: Any) -> tuple[Said, Said, float]:
        without = self.answer(ids, **options)
        return without, self.answer(ids, self.kvc.get_cache(self.text), **options), self.share()

    def share(self, tokens: int | None = None) -> float:
        """Of the full blocks of the last prompt, or of its first ``tokens``, those that came; what the guard took back
        does not count.
        """
        last, before = self.kvc.last, self._unused
        self._unused = self.kvc.counters.total("unused_tokens_total")
        full = (last.prompt_tokens if tokens is None else tokens) // BLOCK * BLOCK
        return max(0.0, last.cached_tokens - (self._unused - before)) / full


def different_prompts(tried: Tried) -> tuple[Said, Said, float]:
    ids = tried.ids.repeat(2, 1)
    ids[1, ids.shape[1] * 3 // 4 :] = tried.ids[0, 5]
    return tried.both(ids)


def chat(tried: Tried) -> tuple[Said, Said, float]:
    """Five turns; of each but the first counts what the one before has computed."""
    turn, known = tried.ids, tried.ids.shape[1]
    shares: list[float] = []
    without: Said = ([], [])
    said: Said = ([], [])
    for _ in range(5):
        for all_turns, cache in ((without, None), (said, tried.kvc.get_cache(turn))):
            tokens, logits = tried.answer(turn, cache)
            all_turns[0].append(tokens)
            all_turns[1].extend(logits)
        shares.append(tried.share(known))
        tried.kvc.add_blocks(tokens)
        known = len(tokens[0]) - 1  # the last was said, and never computed
        turn = torch.cat([torch.tensor(tokens), tried.ids[:, : 2 * BLOCK]], dim=1)
    return without, said, min(shares)


class Streamed:
    """What a streamer is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


def streamer(tried: Tried) -> tuple[Said, Said, float]:
    without, streamed = Streamed(), Streamed()
    tried.answer(tried.ids, streamer=without)
    tried.answer(tried.ids, tried.kvc.get_cache(tried.text), streamer=streamed)
    return (without.tokens, []), (streamed.tokens, []), tried.share()


def pipeline(tried: Tried) -> tuple[Said, Said, float]:
    pipe = transformers.pipeline("text-generation", model=tried.model, tokenizer=tried.tokenizer)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    without = pipe(tried.text, **options)
    cache = tried.kvc.get_cache(tried.text)
    return (without, []), (pipe(tried.text, past_key_values=cache, **options), []), tried.share()


def compiled(tried: Tried) -> tuple[Said, Said, float]:
    without = tried.answer(tried.ids)
    torch._dynamo.reset()
    tried.model.forward = torch.compile(tried.model.forward, backend="eager")
    try:
        return without, tried.answer(tried.ids, tried.kvc.get_cache(tried.text)), tried.share()
    finally:
        del tried.model.forward


USES: dict[str, Use] = {
    "greedy": lambda tried: tried.both(tried.ids),
    "sampled": lambda tried: tried.both(tried.ids, do_sample=True),
    "beams": lambda tried: tried.both(tried.ids, num_beams=3),
    "equal prompts": lambda tried: tried.both(tried.ids.repeat(3, 1)),
    "different prompts": different_prompts,
    "five turns": chat,
    "streamer": streamer,
    "pipeline": pipeline,
    "compiled": compiled,
}
MAY_SERVE_LESS = ("different prompts",)


def _distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The furthest that two rows of logits are apart, in units of their spread."""
    spread = max(float(one[one.isfinite()].float().std()) for one in some)
    return max(float((one - other).nan_to_num(0).abs().max()) for one, other in zip(some, others, strict=True)) / spread


def row(name: str) -> str:
    """A configuration's line of the page. Raises AssertionError where a cell's tokens differ, or too few were found."""
    tokenizer = train_tokenizer(1024)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    worst: dict[str, float] = {}
    for implementation in IMPLEMENTATIONS:
        model = build(name)
        try:
            model.set_attn_implementation(implementation)
        except ValueError:  # this family has the other one only
            continue
        with KVCManager(model, tokenizer, block_tokens=BLOCK) as kvc:
            tried = Tried(model, tokenizer, kvc)
            _check_that_tokens_matter(tried, name)
            for use, run in USES.items():
                if use == "compiled" and use in worst:
                    continue  # takes as long as all others together
                without, said, share = run(tried)
                where = f"{name}, {use}, {implementation}"
                assert said[0] == without[0], f"{where}: other tokens than without a cache"
                if said[1]:
                    differ = _distance(without[1], said[1])
                    assert differ <= ROUNDING[model.dtype], f"{where}: logits differ by {differ:.2g} of their spread"
                assert share >= 0.9 or use in MAY_SERVE_LESS, f"{where}: {share:.0%} of the blocks came"
                worst[use] = min(worst.get(use, 1.0), share)
    return f"| {name} | " + " | ".join(f"{worst[use]:.0%}" for use in USES) + " |"


def _check_that_tokens_matter(tried: Tried, name: str) -> None:
    """Else what is compared would be the same with a wrong cache, too."""
    other = tried.ids.clone()
    other[0, -BLOCK] = 5
    (_, logits), (_, others) = (tried.answer(ids, max_new_tokens=1) for ids in (tried.ids, other))
    differ = _distance(logits, others)
    assert differ > 2 * ROUNDING[tried.model.dtype], f"{name}: logits differ by {differ:.2g} with another token"


def refused(name: str) -> str:
    """A refused configuration's line. Raises AssertionError where it is served."""
    try:
        KVCManager(build(name)).close()
    except UnsupportedModel as error:
        return f"| {name} | {_FIGURES.sub('', str(error))} |"
    raise AssertionError(f"{name} is served")


def main() -> None:
    print(_PAGE.format(version=transformers.__version__, served=len(FAMILIES)), end="")
    print("| configuration | " + " | ".join(USES) + " |\n| --- |" + " --- |" * len(USES))
    for name in filter(known, FAMILIES):
        print(f"{name} …", file=sys.stderr)
        print(row(name), flush=True)
    print(_REFUSED, end="")
    for name in filter(known, REFUSED):
        print(refused(name))


if __name__ == "__main__":
    main()
