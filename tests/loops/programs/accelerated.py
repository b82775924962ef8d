"""A loop of Accelerate, started by its launcher: gradients of two batches for each step of the optimizer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
points = torch.randn(160, 4)
dataset = TensorDataset(points, points.sum(1, keepdim=True))
loop = paceline.Loop("run", dataset, batch_size=24, epochs=4, checkpoint_every="3 steps")
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = loop.prepare(model)
optimizer = loop.keep(torch.optim.AdamW(model.parameters(), 1e-2))
for step, (inputs, targets) in loop:
    loss = F.mse_loss(model(inputs), targets)
    (loss / 2).backward()
    if step % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
    if loop.rank == 0:
        print("step", step, flush=True)
