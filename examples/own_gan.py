"""A generative adversarial network in a loop of your own: two networks, two optimizers, scored by the mean it learns.

python examples/own_gan.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import paceline


def main() -> None:
    """Train, and hold the run to its number."""
    real = torch.tensor([2.0, -1.0]) + 0.5 * torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        loop = paceline.Loop(f"{folder}/run", (real,), batch_size=50, epochs=10, seed=1)
        generator, critic = loop.prepare(
            nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)),
            nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
        )
        opt_g, opt_c = loop.keep(
            torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.9)),
            torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.9)),
        )
        for _, (batch,) in loop:
            fake = generator(torch.randn(len(batch), 4))
            loss_c = F.softplus(-critic(batch)).mean() + F.softplus(critic(fake.detach())).mean()
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
            loss_g = F.softplus(-critic(fake)).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            loop.log(loss_g=loss_g, loss_c=loss_c)
    with torch.no_grad():
        drawn = generator(torch.randn(1000, 4, generator=torch.Generator().manual_seed(1)))
    distance = float((drawn.mean(dim=0) - real.mean(dim=0)).norm())
    print(f"the mean of what it draws is {distance:.2f} from that of the samples, after {loop.total_steps} steps")
    assert distance < 0.5, f"expected less than 0.5, found {distance:.2f}"


if __name__ == "__main__":
    main()
