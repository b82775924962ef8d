"""The programs that are held beside each other, and the reading of the record's table, still work."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of benchmarks/peers."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(PEERS.parent)
    monkeypatch.syspath_prepend(PEERS)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(PEERS.parent)):
            sys.modules.pop(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raw-tuned", "timm", "paceline"])
def test_a_contender_does_the_steps_it_is_asked_for(peers: Any, tmp_path: Path, name: str) -> None:
    if name == "timm":
        pytest.importorskip("timm")
    compare, given = peers("compare"), peers("given")
    sizes = {"batch": 4, "steps": 3, "warmup": 1, "saves": 1}
    spec = given.Spec(network="resnet18", data="resident", precision="bf16", scratch=str(tmp_path), **sizes)
    seen = compare.train(name, Path(sys.executable), spec, tmp_path)
    assert len(seen["steps"]) == 4
    assert seen["started"] < seen["steps"][0] < seen["steps"][-1]


def test_every_workload_is_for_contenders_that_there_are(peers: Any) -> None:
    workloads, known = peers("workloads"), peers("environments").PEERS
    for workload in workloads.WORKLOADS.values():
        assert set(workload.contenders) <= set(known)
        assert {"raw", "paceline"} <= set(workload.contenders), "a loop by hand, and ours"


@pytest.mark.parametrize("peers_asked", [[], ["raw"]])
def test_only_a_comparison_of_all_is_written(
    peers: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peers_asked: list[str]
) -> None:
    """What the contenders do is left out here: their figures are given."""
    compare, hardware = peers("compare"), peers("hardware")
    monkeypatch.setattr(hardware, "RESULTS", tmp_path)
    took: list[list[str]] = []

    def compared(_workload: Any, pythons: Any, _rounds: int, _folder: str) -> Any:
        took.append(list(pythons))
        return {name: [{"step_milliseconds": 2.0}] for name in pythons}, {}

    monkeypatch.setattr(compare, "compare", compared)
    compare.main(["loop-4", "--here", *(["--peers", *peers_asked] if peers_asked else [])])
    written = [json.loads(path.read_text()) for path in tmp_path.glob("peers-loop-4_*.json")]
    if peers_asked:
        assert took == [["raw", "paceline"]], "ours is always there to be compared with"
        assert not written
        assert "Nothing was written: that takes all contenders" in capsys.readouterr().err
    else:
        (result,) = written
        assert set(result["rounds"]) == set(took[0]) > {"raw", "timm", "paceline"}


TABLE = """\
---------------------------------------------------------------------------------
|  run     |  epoch  |  train_acc  |  val_acc  |  tta_val_acc  |  time_seconds  |
---------------------------------------------------------------------------------
|  warmup  |      1  |     0.0990  |   0.1000  |               |       91.2000  |
|          |   eval  |     0.0990  |   0.1000  |       0.1001  |       92.0000  |
|       0  |      1  |     0.5000  |   0.4500  |               |        0.4000  |
|          |   eval  |     0.9500  |   0.9340  |       0.9402  |        2.6000  |
|       1  |      1  |     0.5100  |   0.4600  |               |        0.4100  |
|          |      8  |     0.9500  |   0.9340  |               |        2.5000  |
"""


def test_runs_of_the_record_are_read_without_the_one_that_warms_up(peers: Any) -> None:
    finished = peers("cifar_record").finished
    assert finished(TABLE.splitlines()) == [{"top1_accuracy": pytest.approx(94.02), "seconds": 2.6}]
    assert finished([]) == []
    other = TABLE.replace("|  train_acc", "|  train_loss  |  train_acc").splitlines()
    with pytest.raises(SystemExit, match=r"has the columns run, epoch, train_loss, .*: another program\?"):
        finished(other)


def test_the_record_finds_the_images_where_it_looks_for_them(peers: Any, tmp_path: Path) -> None:
    from PIL import Image

    for split, count in (("train", 2), ("test", 1)):
        for label, name in enumerate("ab"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (label, number, 0)).save(tmp_path / split / name / f"{number}.png")
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "given = torch.load('cifar10/train.pt')\n"
        "assert given['images'].shape == (4, 32, 32, 3) and given['images'].dtype == torch.uint8\n"
        "assert given['labels'].tolist() == [0, 0, 1, 1] and len(given['classes']) == 10\n"
        "assert len(torch.load('cifar10/test.pt')['images']) == 2\n"
        f"print('''{TABLE}''', flush=True)\n"
    )
    module = peers("cifar_record")
    found = module.record(program, tmp_path, 1)
    assert [each["seconds"] for each in found["runs"]] == [2.6]
    assert "mean top-1 94.02 %, 2.60 s" in module.summary_of_run(found)[1]
    with pytest.raises(SystemExit, match=r"program\.py ended after 1 of 2 runs"):
        module.record(program, tmp_path, 2)


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("compare", "loop-4 --rounds 0", "--rounds is 0: give 1 or more"),
        ("compare", "loop-4 --peers paceline-dali", "loop-4 is not for paceline-dali: choose from raw, "),
        ("compare", "gpu-folder", "gpu-folder needs a GPU, and PyTorch sees none here: choose from loop-64, "),
        ("cifar10_speedrun", "cifar10-speedrun-cpu ", "where are the images? Give data.path=PATH"),
        (
            "cifar10_speedrun",
            "cifar10-speedrun-cpu data.path=nowhere",
            "there is nothing at nowhere: correct data.path",
        ),
        (
            "cifar10_speedrun",
            "cifar10-speedrun-cpu data.path=. --seeds",
            "--seeds without a number needs --peers and --budget",
        ),
        (
            "cifar10_speedrun",
            "cifar10-speedrun-cpu data.path=. --seeds --budget 9",
            "--budget is the peers', and no --peers were named",
        ),
        ("cifar10_speedrun", "cifar10-speedrun-cpu data.path=. --peers tim", "invalid choice: 'tim'"),
        (
            "cifar10_speedrun",
            "cifar10-speedrun-cpu data.path=. --seeds --peers timm --budget 9 --record x.py",
            "--record runs as often",
        ),
        ("cifar10_speedrun", "cifar10-speedrun-cpu data.path=. --record x.py", "there is no program at x.py"),
        (
            "cifar10_speedrun",
            "cifar10-speedrun-cpu data.path=. --peers timm",
            ". holds neither CIFAR-10's archive nor the folders train and test",
        ),
    ],
)
def test_what_cannot_be_compared_or_raced_is_refused_at_once(
    peers: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, program: str, words: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        peers(program).parse_options(words.split())
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_a_race_may_do_without_runs_of_ours(peers: Any, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    words = ["cifar10-speedrun-cpu", f"data.path={tmp_path}", "--seeds", "--peers", "timm", "--budget", "9"]
    options = peers("cifar10_speedrun").parse_options(words)
    assert (options.seeds, options.peers, options.budget) == ([], ["timm"], 9)


def test_racers_compute_in_the_precision_they_are_given(peers: Any) -> None:
    fast = peers("cifar_given").Fast
    for precision, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        seen = []
        layer = nn.Conv2d(3, 2, 3)
        layer.register_forward_hook(lambda _layer, _given, answer, seen=seen: seen.append(answer.dtype))
        assert fast(layer, precision)(torch.ones(1, 3, 4, 4)).dtype == torch.float32
        assert seen == [kind]
