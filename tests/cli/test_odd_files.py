"""Special files are refused in one sentence, and what is left out is counted."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from calls import Call


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "pipe.yaml", "--plan-only"),
        ("train", "digits", "--plan-only", "data.saved_split=pipe.json"),
        ("train", "digits", "--plan-only", "data.dataset=csv", "data.path=pipe.csv"),
        ("train", "digits", "--plan-only", "data.dataset=huggingface", "data.path=pipe.parquet"),
        ("train", "gpt-small-docs", "--plan-only", "data.text.tokenizer=pipe.json"),
        ("train", "digits", "--run-dir", "run", "model.initialize_from=pipe.safetensors"),
        ("check-data", "pipe.tar"),
        ("predict", "pipe.safetensors", "x.png"),
        ("tune", "digits", "--trials", "1", "--search", "pipe.yaml"),
        ("bench", "compare", "pipe.json", "pipe.json"),
        ("import", "timm", "--", "--config", "pipe.yaml"),
        ("bench", "compare", 300 * "n", "pipe.json"),
        ("pack", "loop", "packed"),
    ],
)
def test_a_named_pipe_is_never_waited_for_and_no_name_is_too_long(
    paceline_here: Call, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    for name in ("pipe", *(f"pipe.{ending}" for ending in ("yaml", "json", "csv", "parquet", "tar", "safetensors"))):
        os.mkfifo(tmp_path / name)
    (tmp_path / "x.png").touch()
    (tmp_path / "loop").symlink_to("loop")
    done = paceline_here(*arguments)
    assert (done.code, done.out, "Traceback" in done.err) == (2, "", False)
    assert any(why in done.err for why in ("named pipe", "not a regular file", "too long", "link loop"))


def test_what_is_left_out_is_told_in_the_plan_at_the_start_and_by_check_data(
    paceline_here: Call, tmp_path: Path, tiny: tuple[str, ...], write_images: Call
) -> None:
    for name in ("cat", "dog"):
        write_images(tmp_path / "photos" / name, 8)
        (tmp_path / "photos" / name / "Thumbs.db").touch()
    (tmp_path / "photos" / os.fsdecode(b"caf\xe9.md")).touch()
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for path in sorted(tmp_path.glob("photos/*/*.png")):
            key = f"{path.parent.name}-{path.stem}"
            archive.add(path, f"{key}.png")
            archive.add(path, f"{key}.5_cm.png")
            archive.add(__file__, f"{key}.py")
            (tmp_path / "label").write_text(path.parent.name, encoding="utf-8-sig")
            archive.add(tmp_path / "label", f"{key}.cls")
    folder = "files outside the class folders: 1 left out ('caf\\udce9.md')"
    tar = "images with a dot in their names"
    for source, kind, expected in (("photos", "image_folder", folder), ("photos.tar", "webdataset", tar)):
        recipe = ("image_folder", *tiny, "model.name=small_resnet", f"data.dataset={kind}", f"data.path={source}")
        recipe = (*recipe, "data.image_size=8", "batch.global_size=4", "train.duration=1 steps")
        answer = paceline_here("train", *recipe, "--plan-only", "--json").document
        assert answer["plan"]["data"]["classes"] == 2
        assert expected in answer["plan"]["left_out"][0]
        assert set(answer["plan"]["left_out"]) <= set(answer["notices"])
        assert f"note: {expected}" in paceline_here("train", *recipe, "--plan-only").out
        started = paceline_here("train", *recipe, "--run-dir", f"run-{kind}").ended(0)
        assert expected in started.out + started.err
        assert paceline_here("train", *recipe, "--run-dir", f"run-{kind}").code == 0
        if kind == "image_folder":
            assert f"note: {expected}" in paceline_here("evaluate", f"run-{kind}").out
        reported, *_ = paceline_here("evaluate", f"run-{kind}", "--json").document["left_out"]
        assert expected in reported
        checked = paceline_here("check-data", source, "--json")
        findings = {each["kind"]: each for each in checked.document["findings"]}
        names = [entry["name"] for entry in findings["unread"]["entries"]]
        assert any(expected in name or "caf\\udce9.md" in ascii(name) for name in names), names


def test_names_that_are_no_text_are_packed_and_answered(
    paceline_here: Call, tmp_path: Path, tiny: tuple[str, ...], write_images: Call
) -> None:
    latin = os.fsdecode(b"caf\xe9")
    for name in ("cat", latin):
        photos = write_images(tmp_path / "photos" / name, 4)
        (photos / "1.png").rename(photos / f"{latin}.png")
    recipe = ("image_folder", *tiny, "model.name=small_resnet", "data.image_size=8", "batch.global_size=4")
    recipe = (*recipe, "train.duration=1 steps", "data.saved_split=split.txt")
    for source, kind in (("photos", "image_folder"), ("packed", "packed")):
        if kind == "packed":
            assert paceline_here("pack", "photos", "packed").code == 0
        (tmp_path / "split.txt").unlink(missing_ok=True)
        run = (*recipe, f"data.dataset={kind}", f"data.path={source}", "--run-dir", f"run-{kind}")
        paceline_here("train", *run).ended(0)
        assert paceline_here("evaluate", f"run-{kind}", "--predictions", f"{kind}.csv").code == 0
        assert paceline_here("audit", f"run-{kind}").code == 0
        for ending in ("csv", "jsonl", "parquet"):
            paceline_here("predict", f"run-{kind}", "photos", "--output", f"{kind}.{ending}.{ending}").ended(0)
        assert "caf\\udce9/caf\\udce9.png" in (tmp_path / f"{kind}.csv.csv").read_text(encoding="utf-8")
