"""A cost model in a file, in place of learning what prefills take."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymemory.conductor.cost_fit import dump
from skymemory.conductor.cost_model import LLAMA_70B_8xA800
from skymemory.conductor.picker import Fleet
from skymemory.conductor.strategies.estimates import GivenSpeeds
from skymemory.conductor.strategies.least_ttft import LeastTtft
from skymemory.engine.inputs import small_model_folder
from skymemory.errors import InvalidInput
from skymemory.router.prefix_state import PrefixState
from skymemory.router.settings import settings_from

BACKENDS = {"backends": [{"url": "http://127.0.0.1:1"}]}


def a_file(folder: Path) -> str:
    file = folder / "cost.json"
    file.write_text(dump(LLAMA_70B_8xA800))
    return str(file)


@pytest.mark.parametrize("options", [{}, {"events": True}])
def test_the_router_takes_its_seconds_from_the_file(tmp_path: Path, options: dict[str, bool]) -> None:
    """Whichever index it has. Without a file it learns: the first estimate is another."""
    prompts = {"tokenizer": str(small_model_folder())}
    settings = settings_from({**BACKENDS, "cost": a_file(tmp_path), "options": options, "prompts": prompts})
    scorer = PrefixState(settings, Fleet()).scorer
    assert isinstance(scorer, LeastTtft) and isinstance(scorer.speeds, GivenSpeeds)
    assert scorer.speeds.prefills_s((0,), 8000, (4000,)) == [LLAMA_70B_8xA800.prefill_s(8000, 4000)]


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'random' does not estimate seconds"):
        PrefixState(settings_from({**BACKENDS, "cost": a_file(tmp_path), "strategy": "random"}), Fleet())
    with pytest.raises(InvalidInput, match=r"nowhere\.json: No such file"):
        PrefixState(settings_from({**BACKENDS, "cost": str(tmp_path / "nowhere.json")}), Fleet())
