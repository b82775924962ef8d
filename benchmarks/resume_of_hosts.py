"""Which samples does a resumed training lose, in other trainers' loops and in the same loops with Paceline's order?

64 samples that tell their ids, batches of 4 over all processes, three epochs, a network with dropout. Each program
saves every 7 steps in its trainer's way (the one of plain PyTorch with ``paceline.checkpoints``). It is trained without
a stop; then anew, and all its processes are ended by SIGKILL in the middle of the second epoch, after step 24; then it
is started again. Ids and weights are compared with those of the undisturbed run.

The programs with Paceline's order are the code of docs/other-trainers.md, unchanged. The others resume as their
documentation says.

    python benchmarks/resume_of_hosts.py [--dry-run] [PROGRAM …]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hardware import write_result

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, BATCH, EPOCHS = 64, 4, 3
STEPS = EPOCHS * SAMPLES // BATCH
KILLED_AFTER = 24
LIMIT_SECONDS = 600.0

# What the programs import: the user's data, network and objects of the trainer.
MINE = f"""
import atexit, hashlib, json, os, signal
from pathlib import Path
import torch

HOST, WORKERS = os.environ["HOST"], int(os.environ["WORKERS"])
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return {SAMPLES}

    def __getitem__(self, i):
        numbers = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {{"x": numbers, "labels": torch.tensor(i % 2), "id": torch.tensor(i)}}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2))
        self.steps = 0

    def forward(self, x, labels, id):
        if self.steps == int(os.environ["KILLED_AFTER"]):
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        with open(f"{{os.environ['LOG']}}-{{RANK}}", "a") as file:
            file.write(json.dumps(id.tolist()) + "\\n")
        return {{"loss": torch.nn.functional.cross_entropy(self.layers(x), labels)}}


def loss_of(model, batch):
    return model(**batch)["loss"]


@atexit.register
def report():
    numbers = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    Path(f"{{os.environ['LOG']}}.weights").write_text(hashlib.sha256(numbers).hexdigest())


torch.manual_seed(0)
data, model = Data(), Net()
net = model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if HOST == "plain" and WORLD > 1:
    torch.distributed.init_process_group("gloo")
    atexit.register(torch.distributed.destroy_process_group)
    model = torch.nn.parallel.DistributedDataParallel(model)
if HOST == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
if HOST == "fabric":
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
    fabric.launch()
if HOST == "trainer":
    from transformers import TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    args = TrainingArguments(
        "trainer", per_device_train_batch_size={BATCH} // WORLD, num_train_epochs={EPOCHS}, save_steps=7, seed=1,
        report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False, logging_strategy="no",
        dataloader_num_workers=WORKERS,
    )
    checkpoint = get_last_checkpoint("trainer") if os.path.isdir("trainer") else None
"""

# The trainers' own ways.
OWN = {
    "accelerate": f"""
from pathlib import Path
from mine import WORLD, WORKERS, accelerator, data, loss_of, model, optimizer
from torch.utils.data import DataLoader

loader = DataLoader(data, batch_size={BATCH} // WORLD, shuffle=True, num_workers=WORKERS)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
if Path("state").exists():
    accelerator.load_state("state")
    step = int(Path("step").read_text())
for epoch in range(step // len(loader), {EPOCHS}):
    loader.set_epoch(epoch)
    skipped = step % len(loader)
    for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 7 == 0:
            accelerator.save_state("state")
            Path("step").write_text(str(step))
""",
    "lightning": f"""
import lightning
from mine import WORLD, WORKERS, data, loss_of, model
from pathlib import Path
import torch
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(1)
saving = lightning.pytorch.callbacks.ModelCheckpoint("saved", every_n_train_steps=7, save_last=True, save_top_k=-1)
trainer = lightning.Trainer(
    max_epochs={EPOCHS}, accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto", logger=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[saving],
)
loader = DataLoader(data, batch_size={BATCH} // WORLD, shuffle=True, num_workers=WORKERS)
trainer.fit(Module(), loader, ckpt_path="saved/last.ckpt" if Path("saved/last.ckpt").exists() else None)
""",
    "trainer": """
from mine import args, checkpoint, data, model
from transformers import Trainer

Trainer(model, args, train_dataset=data).train(resume_from_checkpoint=checkpoint)
""",
}
PAGE = {"plain": "plain", "accelerate": "with_accelerate", "fabric": "with_fabric", "trainer": "with_trainer"}
NAMES = {
    "plain": "PyTorch",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "lightning": "Lightning Trainer",
    "trainer": "Hugging Face Trainer",
}


def program_of_page(host: str) -> str:
    """The code of docs/other-trainers.md for a trainer."""
    page = (ROOT / "docs" / "other-trainers.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"<!-- file: {PAGE[host]}\.py -->\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return str(code)


def start(folder: Path, host: str, log: str, *, processes: int, workers: int, killed_after: int = -1) -> None:
    """Run the program of a folder to its end, or until it kills itself.

    Raises:
        RuntimeError: If it ends otherwise.
    """
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in launched} | {
        "HOST": host,
        "LOG": str(folder / log),
        "WORKERS": str(workers),
        "KILLED_AFTER": str(killed_after),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, "program.py"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    if (done.returncode == 0) == (killed_after >= 0) or (not launcher and done.returncode not in (0, -signal.SIGKILL)):
        raise RuntimeError(f"{host} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


def steps_of(folder: Path, log: str, processes: int) -> list[list[int]]:
    """The samples of each step, those of all ranks."""
    files = [folder / f"{log}-{rank}" for rank in range(processes)]
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [sorted(each for ids in step for each in ids) for step in zip(*ranks, strict=False)]


def resume(folder: Path, host: str, program: str, *, processes: int, workers: int) -> dict[str, Any]:
    """Train without a stop, then with one; return what the second lost."""
    layout = {"processes": processes, "workers": workers}
    for name in ("whole", "killed"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.py").write_text(MINE)
        (folder / name / "program.py").write_text(program)
    with ThreadPoolExecutor(2) as threads:
        undisturbed = threads.submit(start, folder / "whole", host, "log", **layout)
        threads.submit(start, folder / "killed", host, "first", killed_after=KILLED_AFTER, **layout).result()
        undisturbed.result()
    start(folder / "killed", host, "second", **layout)
    whole = steps_of(folder / "whole", "log", processes)
    second = steps_of(folder / "killed", "second", processes)
    resumed_at = STEPS - len(second)
    steps = steps_of(folder / "killed", "first", processes)[:resumed_at] + second
    length, repeated, missing = STEPS // EPOCHS, 0, 0
    for epoch in range(EPOCHS):
        uses = Counter(each for step in steps[epoch * length : (epoch + 1) * length] for each in step)
        repeated += sum(count - 1 for count in uses.values())
        missing += SAMPLES - len(uses)
    weights = [(folder / name).read_text() for name in ("whole/log.weights", "killed/second.weights")]
    return {
        "resumed_at": resumed_at,
        "repeated": repeated,
        "never_seen": missing,
        "order_equal": steps == whole,
        "weights_equal": weights[0] == weights[1],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill and resume all programs, write the result files; 1 if one with Paceline's order loses a sample."""
    cases = [(f"{host}, own", host, program) for host, program in OWN.items()]
    cases += [(f"{host}, BatchOrder", host, program_of_page(host)) for host in PAGE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(case[0] for case in cases)}")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    head = ("program", "processes", "workers", "resumed at step", "repeated", "never seen", "order", "weights")
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    print("\n".join(table), flush=True)
    rows = []
    for name, host, program in cases:
        if options.programs and name not in options.programs:
            continue
        layouts = ((1, 2), (2, 2)) if "BatchOrder" in name else ((1, 0), (2, 2))[: 1 + (host == "accelerate")]
        for processes, workers in layouts:
            with tempfile.TemporaryDirectory(prefix="hosts-") as scratch:
                found = resume(Path(scratch), host, program, processes=processes, workers=workers)
            rows.append({"program": name, "processes": processes, "workers": workers, **found})
            equal = ["equal" if found[f"{what}_equal"] else "differs" for what in ("order", "weights")]
            shown = f"{NAMES[host]}, {'with BatchOrder' if 'BatchOrder' in name else 'its own order'}"
            cells = (shown, processes, workers, found["resumed_at"], found["repeated"], found["never_seen"], *equal)
            table.append(f"| {' | '.join(map(str, cells))} |")
            print(table[-1], flush=True)
    versions = {each: importlib.metadata.version(each) for each in ("torch", "accelerate", "lightning", "transformers")}
    ours = [row for row in rows if "BatchOrder" in row["program"]]
    lost = sum(row["repeated"] + row["never_seen"] for row in ours)
    line = (
        f"In {len(ours)} resumed runs with BatchOrder, {lost} samples were repeated or never seen; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}."
    )
    print(f"\n{line}")
    if not options.dry_run:
        print(write_result("resume-of-hosts", {"versions": versions, "rows": rows}, [line, "", *table]))
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
