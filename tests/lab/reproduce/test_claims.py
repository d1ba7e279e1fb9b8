"""The claims report: complete, from the kept runs, and the page is its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skymemory.cli.main import main
from skymemory.text import PIPED_WIDTH
from skymemory_lab.reproduce import claims as module
from skymemory_lab.reproduce.claims import PHYSICS, all_claims, as_markdown, as_text

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def listed():
    return all_claims()


@pytest.mark.slow
@pytest.mark.seeded
def test_the_page_is_the_reports_own(listed) -> None:
    assert (ROOT / "docs/reproduce/claims.md").read_text("utf-8") == as_markdown(listed)


@pytest.mark.brief()
def test_every_claim_says_something_in_each_way(listed) -> None:
    assert len({one.key for one in listed}) == len(listed)
    assert {one.document for one in listed} == {
        "SkyMemory paper",
        "SkyMemory disclosure",
        "Cake",
        "Mooncake",
        "Prefix-aware routing",
    }
    for one in listed:
        assert one.what and one.paper and one.model and one.physics and one.measured, one
        for said in (one.physics, one.measured):
            assert not said.startswith("—") or "(" in said, f"{one.key}: a dash without a reason"
        assert one.measured.startswith("—") or one.command, f"{one.key}: measured by nothing"
    assert set(PHYSICS) <= {one.key for one in listed}


def test_what_the_claims_say(listed) -> None:
    of = {one.key: one for one in listed}
    assert of["link"].model == "with 73+ at 550 km"
    assert of["d-m"].model == "1,969,922 m, 6.571 ms" and of["d-n"].physics.startswith("363,364 to 603,780 m")
    assert of["pass"].physics.endswith("4.7 min above 25°")
    assert "(5,3)→(2,3)" in of["figure-8"].measured
    rows = {row["codec"]: row for row in json.loads((ROOT / "docs/benchmarks/table_3.json").read_text())["rows"]}
    assert of["table-3-hqq8"].measured.startswith(f"{rows['hqq8']['plain_total_s']:.1f} s → ")
    assert of["mooncake-scheduling-mean-ttft-random"].paper == "19.65 s"
    assert "precise 37.4 %" in of["routing-accurate"].model


@pytest.mark.brief()
def test_a_physical_model_fills_its_column() -> None:
    (servers,) = (one for one in all_claims({"servers": lambda: "by 12 %"}) if one.key == "servers")
    assert servers.physics == "by 12 %"


@pytest.mark.slow
@pytest.mark.seeded
def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DOCS", None)
    of = {one.key: one for one in all_claims()}
    assert of["first-token"].measured == of["mooncake"].model == module.NO_CHECKOUT
    assert of["link"].model == "with 73+ at 550 km"


@pytest.mark.slow
@pytest.mark.seeded
def test_as_a_command(capsys: pytest.CaptureFixture[str], listed) -> None:
    assert main(["reproduce", "claims"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == as_text(listed, PIPED_WIDTH)
    assert main(["reproduce", "claims", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["key"] == "block"
    assert main(["reproduce", "claims", "--fig", "3"]) == 2
    assert "--markdown" in capsys.readouterr().err
