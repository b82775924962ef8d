"""Every figure that is said has an entry in the ledger of claims, and each entry agrees with files and results."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import counted  # noqa: E402  # the benchmarks are no package
import ledger  # noqa: E402  # the benchmarks are no package
import ledger_figures  # noqa: E402  # the benchmarks are no package
from ledger_page import page  # noqa: E402  # the benchmarks are no package

CLAIMS = ledger.read()
COUNTED_AGAIN = [claim for claim in CLAIMS if claim.check is not None]
# As a claim is written; each test below spoils one thing in it.
ENTRY: dict[str, Any] = {
    "id": "one",
    "topic": "tools",
    "kind": "ours",
    "claim": "It takes 5.8 s.",
    "said": [{"file": "docs/measured.md", "quote": "listed in 5.8 s, and from then on in 0.16 s"}],
    "status": "confirmed",
    "result": "folder-listing_amd-epyc_2026-11.json",
    "figures": [{"what": "the first time", "at": "anew_seconds/median", "says": "5.8", "unit": "s"}],
    "command": "python benchmarks/folder_listing.py",
}
FIGURE = ENTRY["figures"][0]
OTHERS: dict[str, Any] = {"kind": "published", "said": [{"by": "a book"}], "figures": [], "result": None}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[ledger.Claim]]:
    """``read(entry, …)``: claims of a ledger with these entries."""

    def of(*entries: dict[str, Any]) -> list[ledger.Claim]:
        path = tmp_path / "claims.yaml"
        path.write_text(yaml.safe_dump(list(entries)), encoding="utf-8")
        return ledger.read(path)

    return of


def test_nothing_is_wrong_with_the_ledger_and_its_page_is_up_to_date() -> None:
    command = [sys.executable, "scripts/claims", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("claim", COUNTED_AGAIN, ids=lambda claim: str(claim.id))
def test_a_count_is_still_what_the_ledger_says(claim: ledger.Claim) -> None:
    assert claim.check is not None
    found = counted.COUNTS[claim.check]()
    outside = {what: found[what] for what, (low, high) in claim.holds.items() if not low <= found[what] <= high}
    assert not outside, f"{claim.id} holds {claim.holds}"


def test_every_count_is_held_to_something_and_is_in_the_result_file() -> None:
    assert {claim.check for claim in COUNTED_AGAIN} == set(counted.COUNTS)
    (path,) = ledger.RESULTS.glob("counted_*.json")
    assert set(json.loads(path.read_text())["figures"]) == set(counted.COUNTS)


def test_what_was_refuted_by_counting_stays_refuted() -> None:
    refuted = {claim.id for claim in COUNTED_AGAIN if claim.status == "refuted"}
    assert refuted >= {"seeds-of-streams", "drop-last", "growth-interval", "padded-evaluation"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, "one: colour: Extra inputs are not permitted"),
        ({"status": "true"}, "one: status: Input should be"),
        ({"topic": "weather"}, "one: topic: Input should be"),
        ({"said": []}, "one: said: List should have at least 1 item"),
        ({"figures": [{**FIGURE, "says": "about 5"}]}, "one: figures.0.says: String should match"),
        ({"figures": [{**FIGURE, "sais": "5.8"}]}, "one: figures.0.sais: Extra inputs"),
        ({"tested": "yesterday"}, "one: tested: Input should be a valid date"),
        ({"id": "One thing"}, "One thing: id: String should match"),
    ],
)
def test_an_entry_that_is_not_as_it_must_be_is_refused(read: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ledger.LedgerError, match=f"^{said}"):
        read({**ENTRY, **change})


def test_an_entry_in_order_has_no_objection(read: Any) -> None:
    assert list(ledger.objections(read(ENTRY))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"said": [{"file": "docs/measured.md", "quote": "listed in 5.9 s"}]},
            "docs/measured.md no longer says: listed in 5.9 s",
        ),
        ({"said": [{"file": "READYOU.md", "quote": "listed in 5.8 s"}]}, "READYOU.md no longer says"),
        ({"said": [{"file": "README.md"}]}, "said needs either a file and a quote"),
        ({"said": [{"file": "README.md", "quote": "5.8 s", "by": "a book"}]}, "said needs either a file and a quote"),
        ({"figures": [{**FIGURE, "says": "5.9"}]}, "5.9 is written, and the result file has 5.78816"),
        (
            {"figures": [{**FIGURE, "one_over": True, "says": "0.18"}]},
            "0.18 is written, and the result file has 0.17276",
        ),
        ({"figures": [{**FIGURE, "says": "5.80"}]}, "5.80 is written, and the result file has 5.78816"),
        ({"figures": [{**FIGURE, "times": 1000, "says": "5,788"}]}, "5,788 is in neither the claim nor a quote"),
        ({"figures": [{**FIGURE, "at": "anew/median"}]}, "has nothing at anew/median"),
        ({"figures": [{**FIGURE, "at": "anew_seconds/*"}]}, "numbers at anew_seconds/*; say which to take"),
        ({"figures": [{**FIGURE, "at": "files", "says": "300,000"}]}, "does not say how many runs it has"),
        ({"result": "folder-listing.json"}, "there is no result file folder-listing.json"),
        ({"result": None}, "no result file is named"),
        ({"figures": []}, "confirmed needs a figure of a result file, or a test"),
        ({"status": "refuted"}, "refuted needs verdict"),
        ({"status": "refuted", "verdict": "It is not so."}, "refuted needs one of its figures in its verdict"),
        ({"status": "partly"}, "partly needs verdict"),
        ({"status": "waiting", "command": []}, "waiting needs command"),
        ({"command": []}, "confirmed needs command"),
        ({**OTHERS, "status": "not measurable here", "needs": "a GPU", "command": []}, "here needs command"),
        (
            {"command": ["python benchmarks/stop.py", "python benchmarks/folder_listing.py --files 5"]},
            "no command is that of folder-listing_amd-epyc_2026-11.json: python benchmarks/folder_listing.py",
        ),
        (
            {"figures": [FIGURE, {**FIGURE, "result": "report-cost_amd-epyc_2026-11.json"}]},
            "no command is that of report-cost_amd-epyc_2026-11.json: python benchmarks/report.py --runs 3",
        ),
        ({"test": "tests/docs/test_claims.py", "tested": "2026-11-22"}, "no command runs tests/docs/test_claims.py"),
        ({"status": "not measurable here"}, "not measurable here needs needs"),
        ({**OTHERS, "status": "cited"}, "cited needs source"),
        ({"check": "border"}, "check and holds need one another"),
        ({"test": "tests/docs/test_claims.py"}, "test and tested"),
        ({"test": "tests/docs/test_claims.py::test_other", "tested": "2026-11-22"}, "there is no test tests/docs"),
        (
            {"test": "tests/docs/test_claims.py", "tested": "2026-11-22", "figures": []},
            "a figure in README.md or docs/measured.md needs a result file",
        ),
    ],
)
def test_what_does_not_agree_is_told(read: Any, change: dict[str, Any], said: str) -> None:
    found = list(ledger.objections(read({**ENTRY, **change})))
    assert any(each.startswith("one: ") and said in each for each in found), found


@pytest.mark.parametrize(
    ("command", "kept", "same"),
    [
        (
            "python benchmarks/bands.py digits --runs RUNS --seeds 1-5",
            "python bands.py digits --runs /a/b --seeds 1-5",
            True,
        ),
        ("python benchmarks/bands.py digits", "python benchmarks/bands.py digits --runs RUNS --seeds 1-5", False),
        ("python benchmarks/bands.py digits --runs RUNS --seeds 1-5", "python benchmarks/bands.py digits", False),
        ("python benchmarks/packed.py --peers VENV/bin/python", "python packed.py --peers peers/bin/python", True),
        ("python benchmarks/packed.py --rounds 4", "python benchmarks/packed.py --rounds 5", False),
        ("python benchmarks/stop.py", "python benchmarks/stops.py", False),
        (
            'python benchmarks/x.py data.path=HERE "a=4 epochs"',
            "python x.py data.path=c10 a=4 epochs (and again)",
            True,
        ),
        ("python benchmarks/x.py --trained RUN", "python benchmarks/x.py --trained sm --note Reached 39.0.", True),
    ],
)
def test_a_command_is_the_one_of_the_result_file_but_for_places(command: str, kept: str, same: bool) -> None:
    assert ledger.reproduces(command, kept) is same


def test_a_claim_that_stands_twice_and_one_of_the_future_are_told(read: Any) -> None:
    assert "one stands twice" in list(ledger.objections(read(ENTRY, ENTRY)))
    (told,) = ledger.objections(read(ENTRY), today=dt.date(2026, 11, 20))
    assert told.endswith("measured on 2026-11-21, which is not yet")


PAGE = """# Fast

It is 3.5 times
as fast, in 7 ms and at 40 % of the cost. `at 99 %` <!-- 98 % --> [so](97%25) 640 × 480

```console
$ time it: 12 ms
```

| rows | 1,000 images/s |
"""


def site(tmp_path: Path, text: str = PAGE) -> Path:
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    (tmp_path / "docs" / "guide" / "fast.md").write_text(text, encoding="utf-8")
    for name in ("README.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("# None\n", encoding="utf-8")
    return tmp_path


def test_a_figure_that_no_claim_quotes_is_found_and_code_is_not_searched(tmp_path: Path, read: Any) -> None:
    found, idle = ledger_figures.loose([], [], root=site(tmp_path))
    assert [each.figure for each in found] == ["3.5 times", "7 ms", "40 %", "1,000 images/s"]
    assert (found[0].file, idle) == ("docs/guide/fast.md", [])
    said = {"file": "docs/guide/fast.md", "quote": "It is 3.5 times as fast, in 7 ms"}
    exempt = [
        ledger_figures.Exemption("40 % of the cost", "a price"),
        ledger_figures.Exemption("50 %", "nothing has it"),
        ledger_figures.Exemption("1,000 images", "of another page", "README.md"),
    ]
    found, idle = ledger_figures.loose(read({**ENTRY, "said": [said]}), exempt, root=tmp_path)
    assert [each.figure for each in found] == ["1,000 images/s"]
    assert idle == exempt[1:]


@pytest.mark.parametrize(
    "text",
    [
        "takes 3 s of training",
        "in about 2 minutes on a CPU",
        "it takes minutes on two cores",
        "2.5 x faster",
        "3× of it",
        "a peak of 3.5 GiB",
        "within 12 s",
        "goes on for 40 minutes",
    ],
)
def test_figures_in_words_are_found(tmp_path: Path, text: str) -> None:
    assert len(ledger_figures.loose([], [], root=site(tmp_path, text))[0]) == 1


def test_the_page_tells_the_states_as_they_are(read: Any) -> None:
    refuted = {**ENTRY, "id": "two", "status": "refuted", "verdict": "It took 5.8 s. And more."}
    waiting = {**ENTRY, "id": "three", "status": "waiting", "figures": [], "result": None}
    text = page(read(ENTRY, refuted, waiting))
    front, _, tables = text.partition("## Tools")
    assert "](#two) (our own docs/measured.md). **It took 5.8 s.** And more." in front
    assert "the first time: **5.8 s**<br>" in tables
    assert tables.count("| **waiting** |") == 1
    assert "| ours | 1 | 1 | 0 | 1 | 0 | 0 | 3 |" in front


def test_the_page_tells_commands_machines_and_small_numbers_so_that_they_are_read(read: Any) -> None:
    nothing = {"what": "off by", "at": "figures/bias_before_batchnorm/change of the output", "says": "0." + "0" * 14}
    none = {"what": "dropped", "at": "figures/dropped_samples/Paceline drops", "says": "0." + "0" * 14}
    counts = "counted_amd-epyc_2026-11.json"
    commands = ["python benchmarks/folder_listing.py", "python benchmarks/counted.py"]
    text = page(read(ENTRY, {**ENTRY, "id": "two", "result": counts, "figures": [nothing, none], "command": commands}))
    assert "2026-11-21: AMD EPYC, load 8.7 on 2 cores, n = 5*" in text
    assert "off by: **below 1e-14**; dropped: **0**<br>" in text
    assert "<br>`python benchmarks/folder_listing.py`<br>`python benchmarks/counted.py` |" in text
    overhead = "loop-overhead_amd-epyc_2026-11.json"
    measured = json.loads((ROOT / "benchmarks" / "results" / overhead).read_text(encoding="utf-8"))
    taken = measured["measurements"][1]["raw_milliseconds_per_step"]["median"]
    step = {"what": "a step", "at": "measurements/1/raw_milliseconds_per_step/median", "says": f"{taken:.1f}"}
    machine = f"AMD EPYC with {measured['facts']['vectors']}, 2 cores, n = 40*"
    assert machine in page(read({**ENTRY, "result": overhead, "figures": [step]}))
