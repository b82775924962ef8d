"""A mistake costs one sentence: what was found, the rule, the change to make. No traceback, nothing destroyed."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import Call, Done

FOLDER = ("image_folder", "parallel.device=cpu", "telemetry.trackers=[]")


def assert_refused(done: Done, *words: str) -> None:
    """One sentence on standard error with these words in it, exit code 2, and nothing else."""
    assert done.refused(*words).err.count("\n") == 1, done.err


def files_in(root: Path) -> dict[str, bytes]:
    """All files under a directory with their contents; of a lock, which names who held it last, none."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): b"" if path.name == ".lock" else path.read_bytes() for path in files}


# --------------------------------------------------------------------------------------- recipes and overrides

FILES = {
    "not YAML": ("train: [", ("recipe.yaml: not readable as YAML at line 1, column 9: ",)),
    "a misspelt base": ("base: midle.yaml\n", ("base: there is no file 'midle.yaml'. Did you mean 'middle.yaml'?",)),
    "a base that is a number": ("base: 7\n", ("7",)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_file(paceline_here: Call, tmp_path: Path, name: str) -> None:
    text, words = FILES[name]
    (tmp_path / "recipe.yaml").write_bytes(text.encode("latin-1"))
    (tmp_path / "middle.yaml").write_text("base: digits\n")
    assert_refused(paceline_here("train", "recipe.yaml", "--run-dir", "run"), *words)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("backend", ["memory", "pytorch"])
@pytest.mark.parametrize("content", [b"this is no image", b""])
def test_a_file_that_is_no_image(
    paceline_here: Call, tmp_path: Path, write_images: Call, backend: str, content: bytes
) -> None:
    write_images(tmp_path / "photos" / "cat")
    write_images(tmp_path / "photos" / "dog")
    (tmp_path / "photos" / "dog" / "9.png").write_bytes(content)
    net = ("model={name: small_resnet, options: {width: 4, stages: 1}}", "model.pretrained=false")
    shape = ("data.image_size=12", f"data.backend={backend}", "data.augment.crop=none", "batch.global_size=4")
    brief = ("train.duration=1 epochs", "schedule.warmup=0 steps", "train.ema=off")
    done = paceline_here("train", *FOLDER, "data.path=photos", *net, *shape, *brief, "--run-dir", "run")
    assert (done.code, done.err.count("\n")) == (2, 4), done.err
    assert "Traceback" not in done.err
    for word in ("has a file or folder that", "'dog/9.png'", "data.on_bad=skip", "--quarantine"):
        assert word in done.err
    assert not (tmp_path / "run").exists()
    paceline_here(
        "train", *FOLDER, "data.path=photos", *net, *shape, *brief, "data.max_broken=1", "--run-dir", "on"
    ).ended(0)
    assert "was used, or found broken, exactly once per epoch" in paceline_here("audit", "on").out


# ---------------------------------------------------------------------------------------------- run directories


@pytest.mark.parametrize("place", ["file/run", "file", "/proc/run", "/dev/null/run"])
def test_a_directory_that_cannot_be(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    assert_refused(paceline_here("train", "digits", *tiny, "--run-dir", place), place)
    assert files_in(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("name", ["recipe.yaml", "plan.json", "events.jsonl"])
def test_a_damaged_record(
    paceline_here: Call, finished: Path, tiny: tuple[str, ...], tmp_path: Path, name: str
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_text("[{\n" * 2)
    longer = "train.duration=8 steps"
    assert_refused(paceline_here("train", "digits", *tiny, longer, "--run-dir", "run"), name)


# ------------------------------------------------------------------------------------------ evaluate and predict


class _Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploited",)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "step-00000002/model.safetensors"])
@pytest.mark.parametrize("command", ["evaluate", "predict", "train"])
def test_a_pickle_is_never_opened(
    paceline_here: Call, finished: Path, tiny: tuple[str, ...], tmp_path: Path, name: str, command: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(_Exploit()))
    (tmp_path / "0.png").write_bytes(b"")
    arguments = {
        "evaluate": ("evaluate", path),
        "predict": ("predict", path, tmp_path),
        "train": ("train", "digits", *tiny, f"model.initialize_from={path}", "--run-dir", "new"),
    }
    assert_refused(paceline_here(*arguments[command]), path.name)
    assert not (tmp_path / "exploited").exists()


def test_evaluation_on_other_classes(paceline_here: Call, finished: Path, tmp_path: Path, write_images: Call) -> None:
    write_images(tmp_path / "photos" / "cat")
    write_images(tmp_path / "photos" / "dog")
    shape = ("data.image_size=8", "data.channels=1")
    done = paceline_here("evaluate", finished, "data.dataset=image_folder", "data.path=photos", *shape)
    assert_refused(done, "10 classes", "2 classes")


def test_prediction_of_a_broken_image(paceline_here: Call, finished: Path, tmp_path: Path, write_images: Call) -> None:
    """The others are labelled all the same."""
    write_images(tmp_path / "photos", 2)
    (tmp_path / "photos" / "1a.png").write_bytes(b"this is no image")
    reported, as_json = (paceline_here("predict", finished, "photos", *more) for more in ((), ("--json",)))
    assert (reported.code, as_json.code, reported.err, as_json.err) == (1, 1, "", "")
    assert [line.split()[0] for line in reported.out.splitlines()] == [f"photos/{n}.png" for n in ("0", "1", "1a")]
    assert "unreadable" in reported.out.splitlines()[2]
    rows = as_json.document
    assert [row["error"] is None for row in rows] == [True, True, False]
    assert [len(row["labels"]) for row in rows] == [3, 3, 0]


# ------------------------------------------------------------------------------------------------------- worlds


@pytest.mark.parametrize("command", [("train", "digits"), ("evaluate", "run")])
def test_ranks_within_ranks(paceline_here: Call, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert_refused(paceline_here(*command, "--processes", "2"), "--processes", "torchrun")


# -------------------------------------------------------------------------------------------- a process of its own


@pytest.mark.skipif(sys.platform == "win32", reason="exit codes of POSIX")
@pytest.mark.real_processes
def test_the_exit_code_leaves_the_process(paceline: Call) -> None:
    assert_refused(paceline("train", "digits", "optimizer.momentun=0.9"), "Did you mean 'optimizer.momentum'?")


# ------------------------------------------------------------------------------------------- keys without effect


@pytest.mark.parametrize("plan_only", [["--plan-only"], ["--run-dir", "run"]])
def test_a_share_to_hold_out_beside_a_folder_of_held_out_images(
    paceline_here: Call, tmp_path: Path, write_images: Call, plan_only: list[str]
) -> None:
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        write_images(tmp_path / "photos" / name)
    done = paceline_here("train", *FOLDER, "data.path=photos", "data.validation_fraction=0.1", *plan_only)
    assert_refused(done, "data.validation_fraction=0.1", "its own split, the folder val/")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("plan_only", [["--plan-only"], ["--run-dir", "run"]])
def test_an_unused_key_of_a_file_is_told_once_and_no_error(
    paceline_here: Call, tmp_path: Path, tiny: tuple[str, ...], plan_only: list[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("base: digits\nparallel: {bucket_cap_mb: 50}\ndata: {prefetch: 4}\n")
    done = paceline_here("train", "mine.yaml", *tiny, *plan_only)
    # Six steps teach it nothing, which is said; nothing else is.
    assert done.code == 0
    assert all("No better than chance" in line for line in done.err.splitlines())
    assert done.out.count("parallel.bucket_cap_mb=50 has no effect: one process") == 1
    assert done.out.count("data.prefetch=4 has no effect: the memory back-end") == 1


# --------------------------------------------------------------------------------------- what the machine lacks


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit of open files as `ulimit -n` sets it, a hundred above what this process has open."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("requested", [("--plan-only",), ("--run-dir", "run")], ids=["plan", "run"])
def test_loader_processes_that_would_run_out_of_files(
    paceline_here: Any, write_images: Any, tmp_path: Path, few_files: None, requested: tuple[str, ...]
) -> None:
    for name in ("cat", "dog"):
        write_images(tmp_path / "photos" / name, count=8)
    overrides = ("data.path=photos", "data.image_size=32", "model.name=small_resnet", "model.options=null")
    done = paceline_here("train", *FOLDER, *overrides, "batch.global_size=4", "data.workers=20", *requested)
    assert_refused(done, "20 loader processes (data.workers=20, data.prefetch=2)", "'ulimit -n ", "lower data.workers")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_scoring_with_loader_processes_that_would_run_out_of_files(
    paceline_here: Any, finished: Path, few_files: None
) -> None:
    done = paceline_here("evaluate", finished, "data.backend=pytorch", "data.workers=30")
    assert_refused(done, "30 loader processes (data.workers=30, data.prefetch=2)", "'ulimit -n ", "lower data.workers")
