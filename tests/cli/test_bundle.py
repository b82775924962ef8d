"""`report --bundle`: a file for a bug report that holds neither data nor weights, secrets or paths."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.reports.bundle import write_bundle

TOKEN, PLACE = "x9-very-secret-value", "the-private-clinic"


def paceline(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on private pictures, whose recipe and command name a path and a token."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("left", "right"):
        (folder / PLACE / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / PLACE / name / f"patient-{name}-{number}.png")
    trained = paceline("train", PLACE, "train.duration=2 steps", "--run-dir", "run", folder=folder)
    assert trained.returncode == 0, trained.stderr
    environment = folder / "run" / "environment.json"
    program = {"program": str(folder / "patient_study.py"), "code": {"patient_study.py": "0", "patient_parts.py": "0"}}
    environment.write_text(json.dumps(json.loads(environment.read_text()) | program))
    events = folder / "run" / "events.jsonl"
    file = folder / PLACE / "left" / "patient-left-3.png"
    sentence = f"{PLACE} is odd: cannot read {file} with {TOKEN} and hf_abcdefghijklmnop in patient_parts.py"
    with events.open("a") as records:
        records.write(json.dumps({"event": "warning", "step": 2, "time": 1.0, "message": sentence}) + "\n")
        records.write('{"event": "st')  # a kill cut it off
    return folder


def test_a_bundle_holds_no_path_secret_host_or_data(home: Path) -> None:
    made = paceline("report", "run", "--bundle", "--output", "bug.zip", folder=home, WANDB_API_KEY=TOKEN)
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(home / "bug.zip") as archive:
        held = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {name.removeprefix("bug/") for name in held} == {
        "recipe.yaml", "plan.json", "run.json", "environment.json", "events.jsonl", "summary.json",
    }  # fmt: skip
    environment = json.loads((home / "run" / "environment.json").read_text())
    for private in (TOKEN, PLACE, "patient", str(home), "hf_abcdefghijklmnop", environment["command"]):
        assert not any(private in text for text in held.values()), private
    assert json.loads(held["bug/environment.json"])["host"] == "(host)"
    assert "(path) is odd: cannot read (path) with (secret) and (secret) in (file)" in held["bug/events.jsonl"]
    assert json.loads(held["bug/environment.json"])["versions"] == environment["versions"]
    listed = [line.split("  ")[0] for line in made.stderr.splitlines()][: len(held)]
    assert [f"bug/{name}" for name in listed] == list(held), "named before it is written"


def test_damage_and_a_folder_named_as_a_key(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    (run / "plan.json").write_text('{"loss": 1')
    (run / "recipe.yaml").write_text("data:\n  path: /clinic/loss\n  split: test\n  teacher: /clinic/test\n")
    (run / "events.jsonl").write_bytes(b'\xff\n{"loss": 2.0, "message": "the loss of the latest test"}\n')
    write_bundle(run, tmp_path / "bug.zip", lambda _: None)
    with zipfile.ZipFile(tmp_path / "bug.zip") as archive:
        plan, events = (archive.read(f"bug/{name}").decode() for name in ("plan.json", "events.jsonl"))
    assert json.loads(plan) == {"unreadable_characters": 10}
    lines = [json.loads(line) for line in events.splitlines()]
    assert lines == [{"unreadable_characters": 1}, {"loss": 2.0, "message": "the loss of the latest (teacher)"}]


def test_a_bundle_never_replaces_a_file(home: Path) -> None:
    (home / "kept.zip").write_text("mine")
    made = paceline("report", "run", "--bundle", "--output", "kept.zip", folder=home)
    assert made.returncode == 2
    assert "kept.zip exists: remove it, or give another --output." in made.stderr
    assert (home / "kept.zip").read_text() == "mine"


@pytest.mark.parametrize("more", [["--timing"], ["run"]])
def test_a_bundle_is_of_one_run(home: Path, more: list[str]) -> None:
    made = paceline("report", "run", "--bundle", *more, folder=home)
    assert made.returncode == 2
    assert "--bundle is for one run" in made.stderr


KEY = "0123456789abcdef" * 2 + "01234567"
PRIVATE = {
    "windows": (r"cannot read C:\Users\Karla\My Photos\anna.png here", "cannot read (path) here"),
    "share": (r"cannot read \\server\My Share\anna.png", "cannot read (path)"),
    "home": ("no file ~/secret/a b/c.png found", "no file (path) found"),
    "quotes": ("cannot read '/home/karla/Müller, Hans (2)/x=1.png': broken", "cannot read '(path)': broken"),
    "apostrophe": ('cannot read "/d/Anna\'s photos/x.png"', 'cannot read "(path)"'),
    "store": ("no s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@bucket x", "no (address) x"),
    "mail": ("ask karla@firma.de", "ask (address)"),
    "bearer": ("Authorization: Bearer abcdefghijk", "Authorization: Bearer (secret)"),
    "assigned": ("api_key=abcdefghijk failed", "api_key=(secret) failed"),
    "hexadecimal": (f"{KEY} was refused", "(secret) was refused"),
    "file": ("anna-left-3.png is broken, and karten.csv", "(file) is broken, and (file)"),
    "traceback": ('File "/home/karla/My Code/src/anna/train.py", line 3', 'File "(path)", line 3'),
    "user": ("failed for karla: see /home/karla", "failed for (user): see (path)"),
    "module": ('File "/x y/site-packages/torch/nn/a.py", line 3', 'File "(path)/site-packages/torch/nn/a.py", line 3'),
    "plain": ("the run's 12.5 samples/s at step 3/10 of 'loss' in events.jsonl", None),
}


def bundled(run: Path, **files: str | bytes) -> dict[str, str]:
    """Return the files in the bundle of a run that has these files."""
    run.mkdir(exist_ok=True)
    for name, text in {"recipe.yaml": "{}", **{name.replace("__", "."): each for name, each in files.items()}}.items():
        (run / name).write_bytes(text.encode() if isinstance(text, str) else text)
    (run.parent / "bug.zip").unlink(missing_ok=True)
    write_bundle(run, run.parent / "bug.zip", lambda _: None)
    with zipfile.ZipFile(run.parent / "bug.zip") as archive:
        return {name.removeprefix("bug/"): archive.read(name).decode() for name in archive.namelist()}


@pytest.mark.parametrize("kind", PRIVATE)
def test_what_is_private_in_a_sentence_is_replaced(kind: str, tmp_path: Path) -> None:
    sentence, shown = PRIVATE[kind]
    event = {"message": sentence, "revision": KEY}
    held = bundled(tmp_path / "run", events__jsonl=json.dumps(event) + "\n")
    assert json.loads(held["events.jsonl"]) == {"message": shown or sentence, "revision": KEY}


def test_private_names_of_keys_and_values_are_replaced_and_none_is_lost(tmp_path: Path) -> None:
    held = bundled(
        tmp_path / "run",
        recipe__yaml=f"data: {{options: {{api_key: abc-def}}}}\nstep: 1\nnote: {KEY}\n",
        environment__json=json.dumps({"program": "/my code/anna.py", "code": {"anna.py": "1", "berta.py": "2"}}),
        events__jsonl=json.dumps({"files": ["anna"], "counts": {"/d/a.png": 1, "/d/b.png": 2}, "step": 3}) + "\n",
    )
    assert "abc-def" not in held["recipe.yaml"]
    assert KEY not in held["recipe.yaml"]
    assert json.loads(held["environment.json"]) == {"program": "(program)", "code": {"(file)": "1", "(file) 2": "2"}}
    counted = {"files": ["(files)"], "counts": {"(path)": 1, "(path) 2": 2}, "step": 3}
    assert json.loads(held["events.jsonl"]) == counted


def test_a_user_named_as_a_key_or_part_of_a_word_changes_no_other_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user, shown in (("step", {"step": 1, "note": "step latest"}), ("test", {"step": 1, "note": "step latest"})):
        monkeypatch.setenv("USER", user)
        monkeypatch.setenv("LOGNAME", user)
        held = bundled(tmp_path / "run", events__jsonl=json.dumps({"step": 1, "note": "step latest"}))
        assert json.loads(held["events.jsonl"]) == shown


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", b"{"),
        ("summary.json", b""),
        ("recipe.yaml", b"a: [\n"),
        ("recipe.yaml", b"!!python/object/apply:os.system ['x']\n"),
        ("events.jsonl", b"[" * 100_000),
    ],
)
def test_a_damaged_file_is_left_out_and_named(name: str, content: bytes, tmp_path: Path) -> None:
    held = bundled(tmp_path / "run", **{name.replace(".", "__"): content})
    assert "unreadable_characters" in held[name]
    assert str(len(content)) in held[name] or name == "recipe.yaml"


def test_text_that_is_not_utf8_and_separators_within_lines_are_read(tmp_path: Path) -> None:
    line = b'{"event": "a\xff\xe2\x80\xa8 /home/karla/x"}\n'
    (only,) = bundled(tmp_path / "run", events__jsonl=line)["events.jsonl"].rstrip("\n").split("\n")
    assert json.loads(only) == {"event": "a\ufffd\u2028 (path)"}


@pytest.mark.parametrize("text", ["x" * 300_000, "/" + "x" * 300_000, "a b " * 80_000, "/ " * 100_000, '"' * 200_000])
def test_a_long_line_takes_time_in_proportion(text: str, tmp_path: Path) -> None:
    held = bundled(tmp_path / "run", events__jsonl=json.dumps({"message": text}))  # in minutes, were it quadratic
    assert len(json.loads(held["events.jsonl"])["message"]) <= 6 * len(text)
