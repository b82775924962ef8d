"""A plain PyTorch loop with paceline.order.BatchOrder."""

import os
import sys

import torch
from samples import Samples

from paceline.conform import used, watched
from paceline.order import BatchOrder

CONFORM = {
    "start": "{python} {here}/batch_order.py",
    "resume": "{python} {here}/batch_order.py --resume",
    "epochs": 3,
    "checkpoints": "saved.pt",
    "weights": "final.pt",
    "packages": ["torch"],
}

torch.manual_seed(1)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
order = BatchOrder(samples=64, batch_size=4, seed=1)
parts = {"model": model, "optimizer": optimizer, "order": order}
if "--resume" in sys.argv:
    for name, state in torch.load("saved.pt").items():
        parts[name].load_state_dict(state)
loader = torch.utils.data.DataLoader(watched(Samples()), batch_sampler=order, num_workers=1)
while order.step < 3 * len(order):
    for batch in loader:
        used(batch["number"])
        loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        order.step += 1
        if order.step % 5 == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, "new.pt")
            os.replace("new.pt", "saved.pt")
torch.save(model.state_dict(), "final.pt")
