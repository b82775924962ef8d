"""A loop with paceline.Loop, which resumes by itself."""

import torch
from samples import Samples

import paceline
from paceline.conform import used, watched

CONFORM = {
    "start": "{python} {here}/own_loop.py",
    "resume": "{python} {here}/own_loop.py",
    "epochs": 3,
    "steps": 48,
    "checkpoints": "run/checkpoints/step-{step}",
    "weights": "final.pt",
    "packages": ["torch"],
}

torch.manual_seed(1)
loop = paceline.Loop("run", watched(Samples()), batch_size=4, epochs=3, seed=1, checkpoint_every="5 steps")
model = loop.prepare(torch.nn.Linear(8, 2))
optimizer = loop.keep(torch.optim.SGD(model.parameters(), lr=0.1))
for _, batch in loop:
    used(batch["number"])
    loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.save(model.state_dict(), "final.pt")
