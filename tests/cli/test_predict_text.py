"""`paceline predict` of language models: what it prints, and which wrong combinations it refuses in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call

TINY = (
    "model.options={depth: 1, width: 8, heads: 2}",
    "data.text.context=16",
    "train.duration=2 steps",
    "train.precision=fp32",
    "batch.global_size=2",
    "evaluate.every=off",
    "optimizer.name=adamw",
    "optimizer.momentum=null",
    "parallel.threads=1",
    "telemetry.trackers=[]",
    "telemetry.report=false",
)


@pytest.fixture
def trained(paceline_here: Call, tmp_path: Path) -> Call:
    """Train a shipped recipe for two steps; they need no data."""

    def train(name: str) -> Path:
        paceline_here("train", name, *TINY, "--run-dir", tmp_path / name).ended(0)
        return tmp_path / name

    return train


def test_a_prompt_is_gone_on_from(paceline_here: Call, trained: Call) -> None:
    run_dir = trained("gpt-small-docs")
    words = ("predict", run_dir, "--prompt", "The for", "--tokens", 5, "--seed", 3, "--top-k", 4)
    first, again = paceline_here(*words), paceline_here(*words)
    assert (first.code, first.out) == (0, again.out)
    assert first.out.startswith("The for")
    document = paceline_here(*words, "--json").document
    assert document["text"] + "\n" == first.out
    assert (document["written"], document["seed"], document["top_k"]) == (5, 3, 4)
    paceline_here("predict", run_dir, "--prompt", "", "--tokens", 5).ended(0)  # a document begins
    here = Path(__file__).parent
    paceline_here("predict", run_dir, here).refused("a language model", "give --prompt TEXT")
    paceline_here("predict", run_dir, here / "gone.txt").refused("does not exist")
    paceline_here("predict", run_dir, "-", "--stdin-image").refused("--stdin-image has no effect", "take no files")


def test_hidden_tokens_are_found(paceline_here: Call, trained: Call) -> None:
    run_dir = trained("bert-tiny-docs")
    done = paceline_here("predict", run_dir, "--prompt", "The f[MASK]r", "--top-k", 2).ended(0)
    assert len(done.out.splitlines()[-1].split(" %")) == 3  # two guesses
    document = paceline_here("predict", run_dir, "--prompt", "f<mask>r", "--json").document
    assert len(document["guesses"][0]["texts"]) == 3
    paceline_here("predict", run_dir, "--prompt", "f[MASK]r", "--seed", 1).refused("--seed has no effect")
