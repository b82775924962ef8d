"""Lines of many files, a few files at a time, each read once by whichever process needs it."""

import json
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.shards import Shards


def points_of(line):
    return torch.tensor(line["point"]) + 0.1 * torch.randn(3)


Path("lines").mkdir(exist_ok=True)
for number in range(12):
    lines = [json.dumps({"point": [number / 12, place / 9, 1.0]}) for place in range(5 + number)]
    if not Path(f"lines/{number:02}.jsonl").exists():
        Path(f"lines/{number:02}.jsonl").write_text("\n".join(lines))
torch.manual_seed(0)
lines = Shards("lines", decode=points_of, window=3)
loop = paceline.Loop("run", lines, batch_size=12, epochs=3, workers=2, checkpoint_every="3 steps")
model = loop.prepare(nn.Linear(3, 1))
optimizer = loop.keep(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
for step, points in loop:
    loss = (model(points)[:, 0] - points.sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loop.log(loss=loss)
    print("step", step, flush=True)
