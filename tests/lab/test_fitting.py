"""What is measured for a cost model, and how: engines of known times are found out; a real one is measured."""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.lab.door import Door
from tests.settings_file import settings_file

from skymemory.cli.main import main
from skymemory.conductor.cost_fit import decode_errors, fit_decode, fit_prefill, prefill_errors
from skymemory.conductor.cost_model import CostModel, Machine, ModelShape
from skymemory.engine.inputs import small_model_folder
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.router.settings import read_cost
from skymemory_lab.fitting import Measurement, cut, decode_cells, prefill_cells, step_s
from skymemory_lab.replay.client import Client
from skymemory_lab.replay.report import ReplayOutcome, ResponseStatus

SHAPE = ModelShape("small", layers=6, width=256, kv_heads=2, head_dim=64, value_bytes=4, attention_flops=300.0)
TRUTH = CostModel(
    SHAPE,
    Machine("m", 7e10, 1e9, 1e9),
    1.0,
    fixed_s=0.008,
    cached_token_s=2e-6,
    decode_fixed_s=0.001,
    decode_request_s=0.003,
)
BLOCK = 16


class KnownEngine:
    """Answers in virtual time, by ``TRUTH``; it caches whole blocks, and says so unless it is ``silent``."""

    def __init__(self, silent: bool = False) -> None:
        self.silent = silent
        self.known: set[tuple[int, ...]] = set()
        self.under_way = 0
        self.at_once = 0

    async def probe(self, prompt: list[int], output_tokens: int, clock: object) -> ReplayOutcome:
        self.under_way += 1
        self.at_once = max(self.at_once, self.under_way)
        await asyncio.sleep(0)
        batch = self.under_way
        held = (len(prompt) - 1) // BLOCK * BLOCK
        while held and tuple(prompt[:held]) not in self.known:
            held -= BLOCK
        self.known |= {tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)}
        await asyncio.sleep(0)
        self.under_way -= 1
        step_s = TRUTH.decode_step_s(batch, batch * (len(prompt) + output_tokens / 2))
        return ReplayOutcome(
            0,
            ResponseStatus.COMPLETED,
            0.0,
            0.0,
            len(prompt),
            output_tokens,
            first_s=TRUTH.prefill_s(len(prompt), held),
            gaps_s=(step_s,) * (output_tokens - 1),
            prompt_tokens=len(prompt),
            cached_tokens=None if self.silent else held,
            output_tokens=output_tokens,
        )


def measuring(engine: KnownEngine) -> Measurement:
    def make(tokens: int, dice: random.Random) -> list[int]:
        return [dice.randint(300, 1000) for _ in range(tokens)]

    return Measurement(cast(Client, engine), make, lambda: 0.0, 0, lambda what, share: None)


def test_prompts_of_a_known_engine_give_its_cost_model() -> None:
    cells = prefill_cells(32, 1024, (0.0, 0.5, 0.9))
    points = asyncio.run(measuring(KnownEngine()).prefills(cells, 2, "median"))
    assert {point.cached > 0 for point, _ in points} == {True, False}
    assert all(point.cached % BLOCK == 0 and point.cached < point.tokens for point, _ in points)
    cost = fit_prefill([point for point, held in points if not held], replace(SHAPE, attention_flops=4.0))
    held_out = [point for point, held in points if held]
    assert len(held_out) >= 15 and prefill_errors(cost, held_out).worst < 0.002
    assert cost.fixed_s == pytest.approx(TRUTH.fixed_s, rel=0.01)


@pytest.mark.brief()
def test_answers_of_a_known_engine_give_its_steps() -> None:
    engine = KnownEngine()
    points, never = asyncio.run(measuring(engine).decodes(decode_cells(8, (64, 256, 1024)), 1, "median"))
    assert not never and engine.at_once == 8
    cost = fit_decode([point for point, held in points if not held], TRUTH)
    assert decode_errors(cost, [point for point, held in points if held]).worst < 0.01


def test_an_engine_that_reports_no_hits_is_asked_nothing_twice() -> None:
    silent = KnownEngine(silent=True)
    points = asyncio.run(measuring(silent).prefills(prefill_cells(32, 128, (0.0, 0.5)), 1, "median"))
    assert all(point.cached == 0 for point, _ in points)
    with pytest.raises(SkyMemoryError, match=r"shares = \[0\]"):
        asyncio.run(measuring(silent).prefills(prefill_cells(32, 128, (0.5,)), 1, "median"))


def test_only_the_time_while_all_answer_counts() -> None:
    one = ReplayOutcome(0, ResponseStatus.COMPLETED, 0, 0, 1, 4, first_s=1.0, gaps_s=(1.0, 1.0, 1.0))  # at 1 2 3 4
    other = replace(one, first_s=1.5, gaps_s=(1.5, 0.5, 2.0))  # at 1.5 3 3.5 5.5
    assert step_s([one, other]) == pytest.approx((2.0 + 2.0) / 4)  # from 2 to 4, and from 1.5 to 3.5
    assert math.isnan(step_s([one, replace(one, first_s=9.0)]))
    # What came in one go was several steps all the same, and so were pieces of two tokens.
    burst = replace(one, gaps_s=(0.0, 0.0, 3.0, 0.0, 0.0, 3.0))
    assert step_s([burst]) == pytest.approx(1.0)
    assert step_s([replace(burst, output_tokens=13)]) == pytest.approx(0.5)


def test_lengths_held_out_lie_between_those_fitted_on() -> None:
    cells = prefill_cells(64, 1000, (0.0,))
    assert [cell.tokens for cell in cells if not cell.held_out] == [64, 128, 256, 512, 1000]
    assert [cell.tokens for cell in cells if cell.held_out] == [91, 181, 362, 716]
    batches = decode_cells(8, (64, 256, 1024))
    assert {(cell.batch, cell.context) for cell in batches if not cell.held_out} == {
        (batch, context) for batch in (1, 2, 4, 8) for context in (64, 1024)
    }
    assert {cell.batch for cell in batches if cell.held_out} == {1, 2, 3, 4, 6, 8}
    with pytest.raises(InvalidInput):
        prefill_cells(64, 128, (0.0,))
    with pytest.raises(InvalidInput):
        prefill_cells(64, 1024, (1.0,))


def test_a_cut_prompt_is_its_beginning() -> None:
    assert cut([1, 2, 3, 4], 0.5) == [1, 2] and cut("a b c d", 0.75) == "a b c" and cut([7], 0.1) == [7]


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["ids", "tokens"])
def test_a_real_engine_is_measured_and_its_model_can_be_routed_by(
    door: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str
) -> None:
    """How good the fit is is not asked here: others use this computer. What is in the report is."""
    out = tmp_path / "cost.json"
    words = ["--url", f"http://127.0.0.1:{door.port}", "--shape", str(small_model_folder() / "config.json")]
    cells = "lengths = [32, 256]\nshares = [0, 0.5]\nrepeats = 1\nbatch = 2\ncontexts = [32, 64]"
    with settings_file(f"{cells}\nprompt_unit = '{unit}'") as more:
        assert main(["fit", *words, *more, "--out", str(out), "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(printed["prefills"]) >= 14 and not printed["never"] and len(printed["decodes"]) == 4
    cached = [one["cached"] for one in printed["prefills"]]
    assert max(cached) >= 112 and all(one % 16 == 0 for one in cached)
    if unit == "ids":
        assert {one["tokens"] for one in printed["prefills"]} == {32, 45, 64, 91, 128, 181, 256}
    cost = read_cost(out)
    for one in printed["prefills"]:
        assert cost.prefill_s(one["tokens"], one["cached"]) == pytest.approx(one["fitted_s"])
    assert set(printed["errors"]) >= {"prefills fitted on", "prefills held out", "decoding steps fitted on"}


@pytest.mark.slow
def test_the_small_model_is_foretold_by_processor_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths that it was not fitted on, while others use the computer: 10 % is the goal on a quiet one."""
    cells = "lengths = [64, 512]\nshares = [0, 0.75]\nrepeats = 3\ndecode = false"
    with settings_file(f"{cells}\nstatistic = 'fastest'\nclock = 'processor'") as more:
        code = main(["fit", *more, "--within", "25%"])
    assert code == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--url", "http://x"], "needs --shape"),
        (["--settings", "flops = 1e12"], "`flops` and `memory` need each other"),
        (["--settings", "lengths = [64, 100]"], "prompts of 64 to 100 tokens"),
        (["--settings", "lengths = [64]"], "lengths: [64]: expected the first and the last"),
        (["--settings", "shares = [0, 1]"], "must be >= 0 and < 1"),
        (["--settings", "repeats = 0"], "repeats: 0: expected 1 or more"),
        (["--settings", "clock = 'processor'\nthreads = 2"], "with one thread"),
        (["--url", "http://x", "--shape", "/nowhere/config.json"], "cannot read /nowhere/config.json"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--settings" in words:
        (tmp_path / "fit.toml").write_text(words[-1])
        words = [*words[:-1], str(tmp_path / "fit.toml")]
    assert main(["fit", *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1
