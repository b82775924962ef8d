"""A loop with Accelerate that saves every five steps and resumes as its documentation shows.

With ``--seedable`` it sets ``use_seedable_sampler=True``.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from samples import Samples

from paceline.conform import used, watched

CONFORM = {
    "start": "{python} {here}/accelerate_loop.py",
    "resume": "{python} {here}/accelerate_loop.py --resume",
    "epochs": 3,
    "steps": 48,
    "checkpoints": "saved/{step}",
    "weights": "final.pt",
    "packages": ["accelerate", "torch"],
}

accelerator = Accelerator(
    cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler="--seedable" in sys.argv)
)
set_seed(1)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(watched(Samples()), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
if "--resume" in sys.argv:
    step = max(int(path.name) for path in Path("saved").iterdir())
    accelerator.load_state(f"saved/{step}")
for epoch in range(step // 16, 3):
    loader.set_epoch(epoch)
    rest = accelerator.skip_first_batches(loader, step % 16) if step % 16 else loader
    for batch in rest:
        used(batch["number"])
        loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            accelerator.save_state(f"saved/{step}")
torch.save(accelerator.unwrap_model(model).state_dict(), "final.pt")
