"""Are other trainers' command lines read as argparse reads them, and files of arguments too?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.recipe.imports.command import read_source
from paceline.recipe.imports.options import Table, options

TABLE = Table(
    "their trainer",
    options(
        "mapped",
        (
            ("data", "text", None, "a"),
            ("-b --batch-size", "int", 128, "b"),
            ("--lr", "float", None, "c"),
            ("--lr-base", "float", 0.1, "c"),
            ("--betas", "floats", None, "d"),
            ("--amp", "switch", False, "e"),
            ("--model-kwargs", "pairs", {}, "f"),
            ("--decay-rate --dr", "float", 0.1, "g"),
        ),
    )
    + options("listed", (("--output", "text", "", "h"),)),
)


def test_words_are_read_as_argparse_reads_them() -> None:
    typed = "/data -b64 --lr=-1e-3 --betas 0.9 .95 --amp --model-kwargs size=3 kind=big pair=(1,2) --dr .5"
    given = TABLE.read_words([*typed.split(), "--output", "${1:-x}"])
    values = given.values
    assert (values["data"], values["batch_size"], values["lr"], values["betas"]) == ("/data", 64, -1e-3, [0.9, 0.95])
    assert (values["amp"], values["decay_rate"], values["lr_base"]) == (True, 0.5, 0.1)
    assert values["model_kwargs"] == {"size": 3, "kind": "big", "pair": [1, 2]}
    assert given.given == ("data", "batch_size", "lr", "betas", "amp", "model_kwargs", "decay_rate", "output")


@pytest.mark.parametrize("word", ["--batch", "--ba", "--batch-size"])
def test_a_beginning_that_is_only_one_options_is_that_option(word: str) -> None:
    assert TABLE.read_words([word, "7"]).values["batch_size"] == 7


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bacth-size", "3"], "has no option '--bacth-size' (Did you mean '--batch-size'?)"),
        (["--l", "3"], "has no option '--l'"),
        (["/data", "more"], "has no option 'more'"),
        (["--lr", "fast"], "found --lr fast, but their trainer takes a number there"),
        (["-b", "2.5"], "found --batch-size 2.5, but their trainer takes a whole number there"),
        (["--lr", "nan"], "takes a number there"),
        (["--lr"], "--lr of their trainer is given without a value"),
        (["--lr", "$LR"], "what a shell fills in is not known here"),
        (["/data", "$FLAGS"], "what a shell fills in is not known here"),
        (["--model-kwargs", "size"], "takes KEY=VALUE"),
    ],
)
def test_what_does_not_fit_is_named(words: list[str], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        TABLE.read_words(words)
    assert says in str(caught.value)


def test_a_file_of_arguments_gives_what_is_not_the_default() -> None:
    given = TABLE.read_tree(
        {"batch_size": 128, "lr": 0.5, "lr_base": 0.1, "betas": None, "amp": True, "world": 2}, ["world"]
    )
    assert given.given == ("lr", "amp")
    assert given.values["batch_size"] == 128
    with pytest.raises(RecipeError, match="no option 'wrold'"):
        TABLE.read_tree({"wrold": 1})


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"amp": "yes"}, "takes true or false there"),
        ({"lr": True}, "takes a number there"),
        ({"lr": [1]}, "takes a number there"),
        ({"batch_size": None}, "found batch_size: None, but their trainer takes a whole number there"),
        ({"batch_size": 2.5}, "takes a whole number there"),
        ({"data": 5}, "takes text there"),
        ({"betas": ["x"]}, "takes a number there"),
        ({"model_kwargs": ["x"]}, "takes names with values there"),
        ({3: 1}, "no option '3'"),
    ],
)
def test_a_files_values_must_be_of_their_kind(tree: dict[Any, Any], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        TABLE.read_tree(tree)
    assert says in str(caught.value)


def test_words_are_laid_over_defaults_of_a_file() -> None:
    given = TABLE.read_words(["--lr", "3"], {"lr": 1.0, "amp": True})
    assert (given.values["lr"], given.values["amp"], given.given) == (3.0, True, ("lr", "amp"))


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
        source = read_source(words, ("train.py",), ("distributed_train.sh",))
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
        source = read_source(words, ("train.py",), ("distributed_train.sh",))
        assert source.title == "train.py --data-dir s3://there/data --lr 1"
    assert read_source(
        ["KEY=secret ./distributed_train.sh 2 --lr 1"], ("train.py",), ("distributed_train.sh",)
    ).title == ("./distributed_train.sh 2 --lr 1")


def test_a_file_may_hold_a_command_over_several_lines(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "#!/bin/bash\n# train.py is timm's\nexport A=1\n./distributed_train.sh 2 \\\n  --lr 1 \\\n  --amp\n"
    )
    source = read_source([str(script)], ("train.py",), ("distributed_train.sh",))
    assert (source.processes, source.words) == (2, ("--lr", "1", "--amp"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("two.sh", "train.py --lr 1\ntrain.py --lr 2\n", "has 2 commands"),
        ("none.sh", "echo\n", "has no commands"),
        ("quote.sh", "train.py --lr '1\n", "quote without end"),
        ("args.yaml", "lr: [1\n", "not readable as YAML"),
        ("list.yaml", "- 1\n", "no names with values"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_source([str(path)], ("train.py",))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.yaml"], "there is no file 'missing.yaml'"),
        (["python", "other.py"], "no command that starts train.py"),
        (["distributed_train.sh", "--lr"], "is followed by a number of processes"),
    ],
)
def test_what_is_neither_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_source(words, ("train.py",), ("distributed_train.sh",))
    assert says in str(caught.value)
