# Answers of lab 3, one cell for each exercise; `use_answer` runs them in the notebook.


# %% 3.1
def updates(samples: int, batch: int, epochs: int) -> int:
    return math.ceil(samples / batch) * epochs


def epochs_for(wanted: int, samples: int, batch: int) -> int:
    return math.ceil(wanted / math.ceil(samples / batch))


# %% 3.2
def scaled_rate(rate: float, reference_batch: int, batch: int, rule: str) -> float:
    return rate * (batch / reference_batch) ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[rule]


# %% 3.3
def warmup_rate(step: int, first: float, peak: float, warmup_steps: int) -> float:
    if step >= warmup_steps:
        return peak
    return first + (peak - first) * step / warmup_steps


# %% 3.4
def lars_rate(weights: Tensor, gradient: Tensor, weight_decay: float, trust: float = 0.001) -> float:
    length, slope = weights.norm().item(), gradient.norm().item()
    if length == 0 or slope == 0:
        return 1.0
    return trust * length / (slope + weight_decay * length)


# %% 3.5
@torch.no_grad()
def rescaled(network: nn.Sequential, a: float) -> nn.Sequential:
    network = copy.deepcopy(network)
    network[1].weight.mul_(a)
    network[1].bias.mul_(a)
    network[3].weight.div_(a)
    return network


# %% 3.6
def filter_normalised(direction: Tensor, weights: Tensor) -> Tensor:
    if weights.dim() < 2:
        return torch.zeros_like(weights)
    ratio = weights.flatten(1).norm(dim=1) / direction.flatten(1).norm(dim=1)
    return direction * ratio.view(-1, *[1] * (weights.dim() - 1))
