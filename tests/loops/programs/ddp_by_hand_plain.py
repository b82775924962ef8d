"""DistributedDataParallel by hand, with a sampler, under torchrun; the buffers of BatchNorm are the first rank's."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
points = torch.randn(160, 4)
dataset = TensorDataset(points, points.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=24 // dist.get_world_size(), sampler=sampler)
network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
step = 0
for epoch in range(4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        step += 1
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print("step", step, flush=True)
dist.destroy_process_group()
