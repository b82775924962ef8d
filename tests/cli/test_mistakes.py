"""A mistake in any command costs one sentence that names it, before anything is trained, measured or written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from calls import Call

READERS = (
    "report --timing",
    "audit",
    "export --output w.safetensors",
    "landscape",
    "mlperf",
    "report",
    "serve",
    "watch",
)
SCALE = "scale digits"
GIVEN = f"{SCALE} --throughput 1000 --cluster dgx-a100"
KUBERNETES = "launch kubernetes digits --image registry/p:1 --volume-claim disk --dry-run"
PLAN = "plan digits --cluster dgx-a100 --throughput 1 --one-gpu-batch 64 --most-gpus 16"
# What is asked of a recipe in vain, and what the sentence says of it; of its words, each that "…" stands between.
OVERRIDES = [
    ("optimizer.lr.value=1", "optimizer.lr … {'value': 1}"),
    ("data.dataset=7", "data.dataset … 7 … digits"),
    ("model.name=resnet5O", "'resnet5O' … 'resnet50'"),
    ("model.name=nomodule:net", "nomodule"),
    ("model.name=lecture_net model.options={}", "model.name=lecture_net … does not take images of 8 pixels"),
    ("data.text.column=[title,text]", "data.text.column … ['title', 'text'] … join the columns in the table"),
    ("parallel.device=mps", "parallel.device=mps … parallel.device=auto"),
    ("model.initialize_from=no.safetensors", "no.safetensors"),
    ("data.backend=memory data.augment.crop=random_resized", "random_resized … data.backend=pytorch"),
    ("data.backend=dali", "data.backend is dali … data.dataset=digits"),
    ("data.decode_on=gpu", "data.decode_on … data.backend=dali"),
    ("'data.mean=[0.5, 0.5]'", "data.mean … 2 values … 1 channels"),
]
UNUSED = [
    ("data.prefetch=4", "data.prefetch=4 … memory back-end"),
    ("parallel.bucket_cap_mb=50", "parallel.bucket_cap_mb=50 … one process"),
]
# What is typed, RUN for a run that is there, and what the sentence says of it.
MISTAKES = [
    # Words that no command has, and names of nothing.
    ("trian digits", "Did you mean 'train'?"),
    ("train", "RECIPE"),
    ("train digits --run-dri x", "--run-dir"),
    ("train digits --lr 0.3", "optimizer.lr=0.3"),
    ("train digits --batch-size=32", "batch.global_size=32"),
    ("train digits --epochs 3", 'train.duration="3 epochs"'),
    ("train digits --opt", "optimizer.name="),
    ("train digits -b 64", "batch.global_size="),
    ("train digits batch.size=32", "Did you mean 'batch.global_size' or 'batch.micro_size'"),
    ("train digits 'optimizer.options={foo: 1}' --plan-only", "name=sgd"),
    ("train digits data.mix.mixup=1 data.mix.epochs=99 --plan-only", "all are mixed"),
    ("""train digits 'optimizer.groups={"*": {weight_decay: off}}'""", "found off"),
    ("train digits --processes 0", "--processes"),
    ("train digits --processes two", "two"),
    (f"train {'a' * 300}", "File name too long. Correct the path."),
    ("train empty", "contains no folders … For text, write a recipe with task and data.path"),
    ("recipes show", "digits"),
    ("recipes list", "show"),
    ("recipes show digit", "Did you mean 'digits'? `paceline recipes` lists all."),
    ("models resnet5O", "Did you mean 'resnet50'"),
    ("explain optimizer.lrr", "Did you mean 'optimizer.lr'?"),
    ("explain epochs", "Did you mean 'train.duration'?"),
    ("explain optimzer", "Did you mean 'optimizer'?"),
    # What a recipe asks for; where it is refused before training, nothing is left that the corrected command finds.
    *((f"train digits parallel.device=cpu --run-dir run {typed}", message) for typed, message in OVERRIDES),
    *(
        (f"train digits parallel.device=cpu {typed} {how}", message)
        for typed, message in UNUSED
        for how in ("--plan-only", "--run-dir run")
    ),
    ("train digits batch.global_size=96 --plan-only --processes 64", "batch.global_size=96 … 64 processes … 96"),
    ("train empty --plan-only", "empty"),
    ("resume nothing", "nothing"),
    ("resume empty", "empty"),
    ("check-data nowhere", "'nowhere' is not a folder or archive of images"),
    ("check-data synthetic", "'synthetic' trains on noise"),
    ("check-data digits data.nothing=1", "data.nothing"),
    ("check-data digits --workers 0", "--workers"),
    ("launch torchrun digits --run-dir r --nodes 2 --dry-run", "2 hosts need a rendezvous address"),
    ("launch torchrun digits --run-dir r --nodes 2 --rdzv-endpoint host1 --dry-run", "host1 is not HOST:PORT"),
    (f"{KUBERNETES} --run-dir /runs/../a", "is not below /runs, where the volume is"),
    (f"{KUBERNETES} --run-dir /runs/a --job-name My_Run", "--job-name My_Run is not a valid name for a Kubernetes job"),
    # What was trained.
    ("evaluate x --batch-size 64", "batch.global_size="),
    ("evaluate x optimizer.lr=1", "not trained"),
    ("evaluate x --weights average", "ema"),
    ("evaluate nowhere.safetensors", "there is no file 'nowhere.safetensors'; give a run directory"),
    ("evaluate run/checkpoints/step-00000009", "there is no checkpoint 'run/checkpoints/step-00000009'"),
    (f"evaluate {'a' * 300}", "File name too long"),
    ("evaluate RUN --predictions p.txt", ".jsonl"),
    ("evaluate RUN --predictions no/p.csv", "directory"),
    ("evaluate RUN --sizes 8,12", "held no training images out"),
    ("evaluate RUN --sizes 8,0", "'0' is not a size in pixels"),
    ("evaluate RUN --sizes 8 --predictions x.csv", "--predictions has no effect"),
    ("evaluate RUN --per-class --sizes 8", "--per-class has no effect"),
    ("predict x y --batch 64", "predict --help"),
    ("predict x", "--prompt"),
    ("predict nowhere .", "there is no run directory 'nowhere'"),
    ("predict RUN nowhere.png", "nowhere.png"),
    ("predict RUN empty", "no image"),
    ("predict RUN", "a language model takes --prompt"),
    ("predict RUN picture.png --prompt x", "give one of them"),
    ("predict RUN picture.png --tokens 3", "--tokens has no effect here: it is used only with --prompt"),
    ("predict RUN --prompt x", "are not a language model"),
    ("predict RUN --prompt \udcff", "--prompt is not UTF-8 text"),
    *(
        pair
        for command in READERS
        for pair in (
            (f"{command} nowhere", "there is no run directory 'nowhere'; give "),
            (f"{command} empty", "'empty' holds no run (no recipe.yaml); give "),
        )
    ),
    ("landscape RUN --measure everything", "'everything' is not one of 'curve'"),
    ("landscape RUN --samples 1", "'1' is not a number of samples"),
    ("landscape RUN --epsilon big", "'big' is not a valid float"),
    ("landscape RUN optimizer.lr=1", "override 'optimizer.lr' has no effect"),
    ("landscape optimizer.lr=1", "no run was named"),
    ("landscape RUN --output RUN/seen", "is inside the run"),
    ("landscape nowhere --output /dev/null/seen", "/dev/null/seen"),  # before anything is opened, let alone measured
    # What is measured.
    ("bench digits --batch-sizes big", "32,64,128"),
    ("bench digits --batch-sizes 8,8", "twice"),
    ("bench digits --parts all", "'together', 'compute', 'data'"),
    ("bench digits --to loss=1e400", "METRIC=VALUE"),
    ("bench digits --inference --to loss=1", "--inference"),
    ("bench digits --runs 3", "--to"),
    ("bench digits --inference --rounds 3", "no effect"),
    ("bench digits --to loss=1 --batch-sizes 8", "no effect"),
    ("bench digits evaluate.every=off --to loss=1", "evaluate.every"),
    ("bench compare a b", "--output"),
    ("bench compare a", "B"),
    ("bench digits --output there.yaml", "folder"),
    ("find-lr digits --suggestion vally", "'vally' is not one of"),
    ("find-lr digits --apply there.yaml", "this file already exists"),
    ("find-lr digits --output there.yaml", "is a file; name a folder"),
    ("find-lr digits --lr 0.1", "optimizer.lr=0.1"),
    ("find-batch digits --memory 4", "a size needs a unit: 512MiB, 4GiB or 16GB"),
    ("find-batch digits --memory 0GiB", "a size needs a unit"),
    ("sweep-batch digits --batch-sizes 16,x --to loss=1", "'x' is not a valid integer"),
    ("sweep-batch digits --batch-sizes 16 --to top1_acuracy=94", "Did you mean 'top1_accuracy'"),
    ("sweep-batch digits --batch-sizes 16 --to loss=1 --lr-rules cubic", "'cubic' is not one of"),
    ("sweep-batch digits --batch-sizes 16 --to loss=1 --max 3", "found '3'"),
    ("doctor image_folder data.path=nowhere", "has no 'nowhere': correct the path."),
    ("doctor runs/nowhere", "there is no file or run directory 'runs/nowhere'"),
    ("doctor digits --device a1000", "'a1000' is not known. Did you mean 'a100'"),
    ("doctor digits --measure --rounds 1", "1 is not in the range"),
    ("doctor digits --rounds 5", "--rounds has no effect here: it is used only with --measure"),
    ("doctor digits --apply there.yaml", "this file already exists"),
    ("doctor digits --apply nowhere/better.yaml", "there is no folder"),
    ("doctor digits --device a100 --measure", "measures on this machine's device"),
    ("drill digits --only kill-al", "Did you mean 'kill-all'"),
    ("prove digits --processes 0", "0 is not in the range"),
    ("prove synthetic data.samples=7 data.classes=2", "there are 7 training samples"),
    ("prove digits evaluate.metric=f1", "evaluate.metric=f1 is not a metric"),
    ("prove digits task=nowhere:Task", "there is no module 'nowhere'"),
    # What is predicted.
    ("estimate digits --device h10", "device: 'h10' is not known. Did you mean 'h100'"),
    ("formulas zero_byte", "Did you mean 'zero_bytes'"),
    ("formulas zero_bytes stage=1", "zero_bytes needs parameters"),
    ("formulas zero_bytes parameters=1e308 stage=1", "the result is too large"),
    ("formulas zero_bytes parameters=-1 stage=1", "parameters=-1: give a number of at least 0"),
    ("roofline synthetic --device a10", "device: 'a10' is not known"),
    (f"{SCALE} --world-sizes 1,two", "'two'"),
    (f"{SCALE} --world-sizes 0,1", "0 is not in the range"),
    (f"{SCALE} --cluster dgx-a10 --throughput 1", "Did you mean 'dgx-a100'"),
    (f"{SCALE} --cluster no.yaml --throughput 1", "cannot be read"),
    (f"{SCALE} --throughput 1 --step-seconds 1", "--throughput and --step-seconds"),
    (f"{SCALE} --step-seconds 0.1 --cluster dgx-a100", "--one-gpu-batch"),
    (f"{SCALE} --one-gpu-batch 8", "--one-gpu-batch needs"),
    (f"{SCALE} --throughput -1", "--throughput"),
    (f"{SCALE} --throughput nan", "nan is not a finite number"),
    (f"{SCALE} --cluster ethernet-10g parallel.device=cpu", "give --throughput"),
    # Said before anything is run: one sentence, and no line of a measurement before it.
    (f"{SCALE} --world-sizes 1,32 --measure parallel.device=cpu", "at most 16"),
    (f"{GIVEN} --price-per-gpu-hour inf", "inf is not a finite number"),
    (f"{GIVEN} --rounds 3", "--rounds has no effect here"),
    (f"{GIVEN} --world-sizes 7", "7 processes"),
    (f"{GIVEN} --measure", "--measure runs on this machine"),
    (f"{GIVEN} --world-sizes 99999999999999999999", "99999999999999999999 GPUs are too many"),
    (f"{GIVEN} --gpus-measured 8:90000", "8:90000 is 11.2 times 8 GPUs of 1000 … together"),
    ("scale --batches x.csv --samples 9 --world-sizes 8", "without --samples, --world-sizes; leave out"),
    (f"{GIVEN} parallel.exact=true", "parallel.exact=true is not predicted"),
    (f"{PLAN} --deadline 8", "2 hours"),
    (f"{PLAN} --budget 0", "--budget"),
]


@pytest.mark.parametrize(("typed", "message"), MISTAKES)
def test_a_mistake_is_one_sentence_and_changes_nothing(
    paceline_here: Call, finished: Path, tmp_path: Path, typed: str, message: str
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "empty").mkdir()
    before = sorted(finished.rglob("*"))
    done = paceline_here(*shlex.split(typed.replace("RUN", str(finished)))).refused(*message.split(" … "))
    assert done.err.count("\n") == 1, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"there.yaml", "empty"}
    assert (tmp_path / "there.yaml").read_text() == "mine"
    assert sorted(finished.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("words.jsonl", '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n'),
        ("words.csv", "text,label\na,x\nb,y\n"),
    ],
)
def test_text_in_place_of_a_recipe_is_answered_with_the_page(
    paceline_here: Call, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content)
    done = paceline_here("train", name, "--plan-only")
    done.refused(name, "recipe with task and data.path (docs/guide/language-models.md)")
