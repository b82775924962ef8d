"""Command lines and argument files of other trainers are read as argparse reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from golden_sentences import raises

from paceline.errors import RecipeError
from paceline_ops.imports.command import read_source
from paceline_ops.imports.table import OptionTable

SCRIPTS = (("train.py",), ("distributed_train.sh",))
ROWS = """
data: {text: null, rule: a}
-b --batch-size: {int: 128, least: 1, rule: b}
--lr: {float: null, rule: c}
--lr-base: {float: 0.1, rule: c}
--betas: {floats: null, rule: d}
--amp: {switch: false, rule: e}
--model-kwargs: {pairs: {}, rule: f}
--decay-rate --dr: {float: 0.1, rule: g}
--output: {text: '', no_effect: h}
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> OptionTable:
    path = tmp_path_factory.mktemp("table") / "their.yaml"
    path.write_text(ROWS)
    return OptionTable("their trainer", path)


def test_words_are_read_as_argparse_reads_them(table: OptionTable) -> None:
    typed = "-b64 --lr=-1e-3 --betas 0.9 .95 --amp --model-kwargs size=3 kind=big pair=(1,2) --dr .5"
    given = table.read_words(["/data", *typed.split(), "--output", "${1:-x}"])
    assert given == {
        "data": "/data",
        "batch_size": 64,
        "lr": -1e-3,
        "betas": [0.9, 0.95],
        "amp": True,
        "model_kwargs": {"size": 3, "kind": "big", "pair": [1, 2]},
        "decay_rate": 0.5,
        "output": "${1:-x}",
    }
    assert list(given)[:3] == ["data", "batch_size", "lr"]


@pytest.mark.parametrize("word", ["--batch", "--ba", "--batch-size"])
def test_a_beginning_of_only_one_option_is_that_option(table: OptionTable, word: str) -> None:
    assert table.read_words([word, "7"]) == {"batch_size": 7}


@pytest.mark.parametrize(
    ("given", "key", "rule"),
    [
        (["--bacth-size", "3"], "--bacth-size", "a known option"),
        (["--l", "3"], None, None),
        (["/data", "more"], "more", "a known option"),
        (["--lr", "fast"], "--lr", None),
        (["-b", "2.5"], "-b/--batch-size", None),
        (["-b", "0"], "-b/--batch-size", None),
        (["--lr", "nan"], "--lr", None),
        (["--lr"], "--lr", None),
        (["--lr", "$LR"], "--lr", None),
        (["/data", "$FLAGS"], None, "values"),
        (["--model-kwargs", "size"], "--model-kwargs", None),
        ({"amp": "yes"}, "amp", "true or false"),
        ({"lr": True}, "--lr", None),
        ({"lr": [1]}, "lr", "one value"),
        ({"batch_size": None}, "batch_size", "a value"),
        ({"batch_size": 2.5}, "-b/--batch-size", None),
        ({"betas": ["x"]}, "--betas", None),
        ({"model_kwargs": ["x"]}, "--model-kwargs", None),
        ({3: 1}, "3", "a known option"),
        ({"wrold": 1}, "wrold", "a known option"),
    ],
)
def test_what_does_not_fit_is_named(table: OptionTable, given: Any, key: str | None, rule: str | None) -> None:
    with raises(RecipeError, key=key, rule=rule):
        table.read_tree(given) if isinstance(given, dict) else table.read_words(given)


def test_a_file_of_arguments_gives_what_is_not_the_default(table: OptionTable) -> None:
    tree = {"batch_size": 128, "lr": 0.5, "lr_base": 0.1, "betas": None, "amp": True, "model_kwargs": {"a": "7"}}
    assert table.read_tree({**tree, "world": 2}, ["world"]) == {"lr": 0.5, "amp": True, "model_kwargs": {"a": "7"}}


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("train.py --lr 1", 1),
        ("CUDA_VISIBLE_DEVICES=0,1 python -u ./train.py --lr 1", 1),
        ("./distributed_train.sh 4 --lr 1", 4),
        ("bash distributed_train.sh 4 --lr 1", 4),
        ("torchrun --nproc_per_node=8 train.py --lr 1", 8),
        ("torchrun --nproc-per-node 8 --nnodes=2 --rdzv-endpoint host:1 train.py --lr 1", 16),
        ("python -m torch.distributed.launch --nproc_per_node 2 train.py --lr 1", 2),
        ("torchrun --nproc_per_node=gpu train.py --lr 1", None),
        ("torchrun --nproc_per_node=8 --nnodes 1:4 train.py --lr 1", None),
        ("--lr 1", 1),
    ],
)
def test_a_command_says_how_many_processes_it_starts(command: str, processes: int | None) -> None:
    for words in ([command], command.split()):
        source = read_source(words, *SCRIPTS)
        assert (source.processes, source.words, source.script) == (processes, ("--lr", "1"), "train.py")


@pytest.mark.parametrize(
    "before",
    [
        "WANDB_API_KEY=secret python",
        "env WANDB_API_KEY=secret python -u",
        "docker run --env=KEY=secret -e OTHER=secret image python",
        "sshpass -p secret ssh host torchrun --nproc_per_node=2",
    ],
)
def test_what_it_is_called_holds_no_secret(before: str) -> None:
    called = "train.py --data-dir s3://them:secret@there/data --lr 1"
    for words in ([f"{before} {called}"], [*before.split(), *called.split()]):
        assert read_source(words, *SCRIPTS).title == "train.py --data-dir s3://there/data --lr 1"
    launched = read_source(["KEY=secret ./distributed_train.sh 2 --lr 1"], *SCRIPTS)
    assert launched.title == "./distributed_train.sh 2 --lr 1"


def test_a_command_may_be_longer_than_a_file_name() -> None:
    source = read_source([f"train.py --lr 1 --model {'a' * 300}"], *SCRIPTS)
    assert source.words == ("--lr", "1", "--model", "a" * 300)


def test_a_file_may_hold_a_command_over_several_lines(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    lines = "#!/bin/bash\n# train.py is timm's\nexport A=1\n./distributed_train.sh 2 \\\n  --lr 1 \\\n  --amp\n"
    script.write_text(lines)
    source = read_source([str(script)], *SCRIPTS)
    assert (source.processes, source.words) == (2, ("--lr", "1", "--amp"))


@pytest.mark.parametrize(
    ("words", "text", "fields"),
    [
        ("two.sh", "train.py --lr 1\ntrain.py --lr 2\n", {"path": "two.sh", "value": 2}),
        ("none.sh", "echo\n", {"path": "none.sh", "value": 0}),
        ("quote.sh", "train.py --lr '1\n", {"value": "train.py --lr '1", "rule": "a shell command"}),
        ("args.yaml", "lr: [1\n", {"path": "args.yaml", "rule": "YAML"}),
        ("list.yaml", "- 1\n", {"path": "list.yaml", "rule": "NAME: VALUE lines"}),
        ("missing.yaml", None, {"path": "missing.yaml"}),
        ("python other.py", None, {"value": "python other.py", "rule": "a file or a command"}),
        ("distributed_train.sh --lr", None, {"key": "distributed_train.sh", "rule": "a number of processes"}),
    ],
)
def test_what_is_neither_command_nor_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, text: str | None, fields: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(words).write_text(text)
    with raises(RecipeError, **fields):
        read_source(words.split(), *SCRIPTS)
