"""A training program without torch, correct unless PLANTED names a fault or another correct way to write it."""

import json
import os
import random
import struct
import sys
import threading
import time
from pathlib import Path

from paceline.conform import used, value, watched

PLANTED = os.environ.get("PLANTED", "")
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, BATCH, EPOCHS, SEED, HELD_OUT = 62, 4, 3, 7, 9
PER_EPOCH = SAMPLES // BATCH if PLANTED in ("drops", "drops-as-described") else -(-SAMPLES // BATCH)
meet = globals().get("meet", lambda: None)  # all ranks wait for one another
is_resumed = "--resume" in sys.argv


class Numbers:
    """Samples that are a little different each time."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        if PLANTED == "fixed-augmentation":
            return index + random.Random(index).random()
        if PLANTED == "own-seed":
            random.seed(f"{index}-{state['step'] // PER_EPOCH}")
        return index + random.random()


class Stream:
    """The same as a stream of an epoch's rest."""

    def __iter__(self):
        for ids in batches_of(state["step"] // PER_EPOCH)[state["step"] % PER_EPOCH :]:
            yield from ((index, float(index)) for index in ids)


def order_of(epoch: int) -> list[int]:
    """Return the samples of an epoch."""
    if PLANTED in ("reshuffled", "later-epochs") and is_resumed:
        draws = random.Random(f"{epoch}-again" if PLANTED == "reshuffled" or epoch > first_epoch else f"{SEED}-{epoch}")
    elif PLANTED in ("unseeded", "saved-order"):
        draws = random.Random(time.time_ns())
    else:
        draws = random.Random(f"{SEED}-{epoch}")
    if PLANTED == "saved-order":
        return state["orders"].setdefault(str(epoch), draws.sample(range(SAMPLES), SAMPLES))
    if PLANTED in ("replacement", "replacement-as-described"):
        return draws.choices(range(SAMPLES), k=SAMPLES)
    samples = range(SAMPLES - 1) if PLANTED == "last-sample" else range(SAMPLES)
    return draws.sample(samples, len(samples))


def batches_of(epoch: int) -> list[list[int]]:
    """Return this rank's batches of an epoch."""
    order = order_of(epoch)
    if PLANTED in ("pads", "pads-as-described"):
        order += order[: -SAMPLES % BATCH]
    batches = [order[at * BATCH : (at + 1) * BATCH] for at in range(PER_EPOCH)]
    if PLANTED == "rank-repeats" and is_resumed and RANK:
        batches = batches[-1:] + batches[:-1]
    return batches if PLANTED == "unsharded" else [batch[RANK::WORLD] for batch in batches]


def rate(step: int) -> float:
    """Return the learning rate of a step."""
    shift = {"rate-restarts": started, "rate-off-by-one": 1 if is_resumed else 0}.get(PLANTED, 0)
    return 0.1 * (1 - (step - shift) / (PER_EPOCH * EPOCHS))


def save(step: int, state: dict) -> None:
    """Write a checkpoint, whole or not at all."""
    content = json.dumps({**state, "step": step, "filler": "x" * 2000})
    folder = Path("out")
    folder.mkdir(exist_ok=True)
    target = folder / (f"ck-{step}.json" if PLANTED in ("in-thread", "step-names") else "ck.json")
    if PLANTED == "removes-first":
        target.unlink(missing_ok=True)
    if PLANTED == "in-place":
        target.write_text(content)
        return
    with open(folder / "new", "w") as file:
        file.write(content)
    os.replace(folder / "new", target)


def load() -> dict:
    """Return the newest checkpoint."""
    found = sorted(Path("out").glob("ck*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not found or PLANTED == "begins-again":
        return fresh
    return json.loads(found[-1].read_text())


def evaluate() -> None:
    """Count held-out samples."""
    held_out = watched(range(HELD_OUT), "evaluation")
    per_rank = HELD_OUT // WORLD if PLANTED == "evaluation-drops" else -(-HELD_OUT // WORLD)
    mine = [(RANK + at * WORLD) for at in range(per_rank)]
    for index in mine:
        held_out[index % HELD_OUT]
    used([index % HELD_OUT for index in mine if index < HELD_OUT or PLANTED == "evaluation-pads"], "evaluation")


fresh = {"step": 0, "weights": [0.0, 0.0], "momentum": [0.0, 0.0], "average": [0.0, 0.0], "orders": {}, "random": None}
state = load() if is_resumed else fresh
if is_resumed and PLANTED == "cannot-resume":
    sys.exit("no such key: optimizer")
if is_resumed and state["step"]:
    first = state["step"]
    state["step"] += {
        "restarts-epoch": -(first % PER_EPOCH),
        "skips-rest": -first % PER_EPOCH,
        "skips-batch": 1,
        "repeats-batch": -1,
    }.get(PLANTED, 0)
    if PLANTED == "no-weights":
        state["weights"] = [0.0, 0.0]
    if PLANTED == "no-momentum":
        state["momentum"] = [0.0, 0.0]
    if PLANTED == "no-average":
        state["average"] = [0.0, 0.0]
started, first_epoch = state["step"], state["step"] // PER_EPOCH
total = PER_EPOCH * (EPOCHS + {"one-more-epoch": 1, "one-epoch-less": -1}.get(PLANTED, 0) * is_resumed)
data = watched(Stream(), key=lambda item: item[0]) if PLANTED == "stream" else watched(Numbers())
random.seed(f"{SEED}-{RANK}")
if state["random"] and PLANTED == "saved-random":
    random.setstate((state["random"][0], tuple(state["random"][1]), state["random"][2]))
writer = None
while state["step"] < total:
    epoch, first = divmod(state["step"], PER_EPOCH)
    items = iter(data) if PLANTED == "stream" else None
    batches = batches_of(epoch)
    if PLANTED == "reads-skipped":
        for ids in batches[:first]:
            [data[index] for index in ids]
    if PLANTED == "same-each-epoch":
        random.seed(SEED)
    for ids in batches[first:]:
        if PLANTED not in ("saved-random", "random-restarts", "same-each-epoch", "same-on-ranks"):
            random.seed(f"{SEED}-{state['step']}-{RANK}")
        if PLANTED == "same-on-ranks":
            random.seed(f"{SEED}-{state['step']}")
        if PLANTED == "loader-process":
            if not (pid := os.fork()):  # a worker with the same generator for each batch
                random.seed(SEED)
                [data[index] for index in ids]
                os._exit(0)
            os.waitpid(pid, 0)
            batch = [float(index) for index in ids]
        else:
            batch = [next(items)[1] for _ in ids] if items else [data[index] for index in ids]
        if PLANTED not in ("reads-only", "reads-skipped"):
            used(ids)
        step = state["step"] + 1
        value("lr", step, rate(step))
        for place in range(2):
            gradient = sum(state["weights"][place] - each / SAMPLES * (place + 1) for each in batch) / len(batch)
            state["momentum"][place] = 0.9 * state["momentum"][place] + gradient
            state["weights"][place] -= rate(step) * state["momentum"][place]
            state["average"][place] += 0.05 * (state["weights"][place] - state["average"][place])
        state["step"] = step
        meet()
        if RANK == 0 and (step % PER_EPOCH == 0 if PLANTED == "epoch-saves" else step % 5 == 0):
            state["random"] = random.getstate()
            if PLANTED == "in-thread":
                if writer:
                    writer.join()
                writer = threading.Thread(target=save, args=(step, json.loads(json.dumps(state))))
                writer.start()
            else:
                save(step, state)
        meet()
    evaluate()
if writer:
    writer.join()
if RANK == 0:
    values = [*state["weights"], *state["average"]]
    header = json.dumps({"w": {"dtype": "F64", "shape": [4], "data_offsets": [0, 32]}}).encode()
    Path("final.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<4d", *values))
