"""DistributedDataParallel by hand, with a sampler, under torchrun; the buffers of BatchNorm are the first rank's."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

torch.manual_seed(0)
points = torch.randn(160, 4)
dataset = TensorDataset(points, points.sum(1, keepdim=True))
loop = paceline.Loop("run", dataset, batch_size=24, epochs=4, checkpoint_every="3 steps")
network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = loop.prepare(network)
optimizer = loop.keep(torch.optim.AdamW(model.parameters(), 1e-2))
for step, (inputs, targets) in loop:
    loss = F.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loop.rank == 0:
        print("step", step, flush=True)
