"""Lines of many files, a few files at a time, each read once by whichever process needs it."""

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader


def points_of(line):
    return torch.tensor(line["point"]) + 0.1 * torch.randn(3)


Path("lines").mkdir(exist_ok=True)
for number in range(12):
    lines = [json.dumps({"point": [number / 12, place / 9, 1.0]}) for place in range(5 + number)]
    if not Path(f"lines/{number:02}.jsonl").exists():
        Path(f"lines/{number:02}.jsonl").write_text("\n".join(lines))
torch.manual_seed(0)
lines = [points_of(json.loads(line)) for path in sorted(Path("lines").iterdir()) for line in path.open()]
loader = DataLoader(lines, batch_size=12, shuffle=True)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
step = 0
for epoch in range(3):
    for points in loader:
        step += 1
        loss = (model(points)[:, 0] - points.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, flush=True)
