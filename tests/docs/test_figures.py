"""scripts/figures finds a figure that is not that of its result file, and one without a source."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = runpy.run_path(str(ROOT / "scripts" / "figures"))
main, problems = FIGURES["main"], FIGURES["problems"]
RIGHT = """\
2.47 or 2.5 × <!-- from cpu-precision: 2.47 = speedups['bf16 channels_last'].median; 2.5 = batch_size / 102.4 -->

509,000 tokens/s, Lightning 2.6.6 <!-- from gpu-throughput: 509,000 = measurements[1].paceline_per_second.median -->
below 0.5 <!-- not measured: 0.5 -->

torch 2.11, Python 3.11 and timm 1.0.31 at batch 256, 224 pixels, in 2024, by `sleep 0.1`

```console
2.47 s
```
"""


@pytest.mark.parametrize("name", FIGURES["COMPLETE"])
def test_any_falsified_figure_of_a_page_fails(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not problems(name, text)
    shown, tried = FIGURES["visible"](text), 0
    for block in FIGURES["_BLOCK"].finditer(text):
        for kind in FIGURES["_FIGURES"][-2:]:
            for found in kind.findall(shown, *block.span()):
                assert problems(name, block[0].replace(found, found + "1", 1)), found
                tried += 1
    assert tried


def test_the_script_reads_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("a gain of 2.47")
    assert main() == 1


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("2.47", "2.48", "README.md:1: 2.48 is 2.47145 in cpu-precision: speedups['bf16 channels_last'].median"),
        ("2.47 or", "2.46 or", "the text does not state 2.47"),
        ("2.47 or 2.5", "2.5 or 2.47", "or not in the order of the comment"),
        ("channels", "rows", "cpu-precision has no speedups['bf16 rows_last']"),
        ("cpu-", "no-", "benchmarks/results has 0 files of that name"),
        ("from cpu", "from: cpu", "this comment is not written as scripts/figures describes"),
        ("509,", "510,", "510,000 is 509143 in gpu-throughput"),
        ("below 0.5", "below 0.5, or 20 and 30 % of 5", "20 has no source"),
        ("below 0.5", "below 0.5, another 289, and more", "289 has no source"),
        ("below 0.5", "below 0.5 in 19 of 20", "20 has no source"),
    ],
)
def test_what_is_wrong_is_named(right: str, wrong: str, said: str) -> None:
    assert not problems("README.md", RIGHT)
    assert said in "\n".join(problems("README.md", RIGHT.replace(right, wrong)))
