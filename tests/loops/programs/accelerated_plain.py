"""A loop of Accelerate, started by its launcher: gradients of two batches for each step of the optimizer."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
points = torch.randn(160, 4)
dataset = TensorDataset(points, points.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=24 // accelerator.num_processes, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
for epoch in range(4):
    for inputs, targets in loader:
        step += 1
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            print("step", step, flush=True)
