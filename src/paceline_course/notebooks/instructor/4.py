# Answers of lab 4, one cell for each exercise; `use_answer` runs them in the notebook.


# %% 4.1
def to_device(batch, device):
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(each, device) for each in batch)
    return batch


# %% 4.2
class Centre(nn.Module):
    """Subtracts the mean image."""

    def __init__(self, mean: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean


# %% 4.3
def allocated_bytes(numbers: list[int]) -> int:
    return sum(math.ceil(4 * each / 512) * 512 for each in numbers)


# %% 4.4
numbers_kept = {
    "the image": 1 * 28 * 28,
    "after the encoder's first ReLU": 16 * 14 * 14,
    "after the encoder's second ReLU": 32 * 7 * 7,
    "the code": 64,
    "after the decoder's first ReLU": 32 * 7 * 7,
    "after the decoder's second ReLU": 16 * 14 * 14,
    "after the sigmoid": 1 * 28 * 28,
}


# %% 4.5
def crossover(cpu: tuple[float, float], gpu: tuple[float, float]) -> float:
    return (gpu[0] - cpu[0]) / (cpu[1] - gpu[1])


# %% 4.6
global_batch = 256 * 32
learning_rate = 0.1 * global_batch / 256
optimizer_steps = 90 * math.ceil(1_281_167 / global_batch)
hours = 29 / (256 / 8 * 0.9)
