"""Do the network's sizes fit the device: matrix units, tiles, and the work for each byte that is moved?

All of it is predicted from sizes, by rules that were written for older libraries: newer ones pad and split by
themselves and lose less.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.layers import BYTES, Layer
from paceline_advisor.doctor.sources import CONVOLUTION, INTENSITY, LINEAR, MEMORY_LIMITED, RECURRENT
from paceline_advisor.doctor.subject import Subject, named

_MUCH = 0.05
_MOST = 0.5
_TILE = 64
_COMPUTE_BOUND = {"batch": 128, "hidden": 256}


def alignment(subject: Subject) -> Iterator[Finding]:
    """Sizes that matrix units cannot take as they are."""
    multiples = subject.target.multiples(subject.products)
    if multiples is None:
        return
    unit, best = multiples
    odd = [layer for layer in _inner(subject) if _divisor_fails(layer, unit)]
    share = _share(subject, odd)
    if share < _MUCH:
        return
    yield Finding(
        name="dimension_alignment",
        severity="slows",
        evidence=f"{len(odd)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, have sizes that are no "
        f"multiple of {unit} ({subject.products}): {_shapes(odd)}",
        why=f"Matrix units take sizes that divide by {unit} for {subject.products}, on an A100 and later best by {best}"
        "; others are padded, or computed without them.",
        source=f"{LINEAR}; {CONVOLUTION}",
        advice=Advice(
            words=f"round widths to a multiple of {best if best <= _TILE else unit}, or of {unit}; "
            f"{_example(odd[0], unit)}",
            keeps="training",
        ),
        expected="predicted: up to 2 times as fast where libraries do not pad, less where they do",
        speedup=(1.1, 2.0),
        layers=tuple(layer.name for layer in odd),
        predicted=True,
    )


def batch_alignment(subject: Subject) -> Iterator[Finding]:
    """A batch that matrix units cannot take as it is, where nothing but the batch makes rows."""
    multiples, batch = subject.target.multiples(subject.products), subject.plan.micro_batch_size
    flat = subject.share(lambda layer: layer.kind == "linear" and layer.rows == 1)
    if multiples is None or batch % multiples[0] == 0 or flat < _MOST:
        return
    unit = multiples[0]
    yield Finding(
        name="batch_alignment",
        severity="slows",
        evidence=f"a micro-batch of {batch} is no multiple of {unit} ({subject.products}), and linear layers, whose "
        f"rows are samples, have {flat:.0%} of the FLOPs",
        why=f"Matrix units take sizes that divide by {unit} for {subject.products}; others are padded.",
        source=LINEAR,
        advice=Advice(words=f"micro-batches in multiples of {unit}, ideally of {_TILE} to 256", keeps="training"),
        expected="predicted: up to 2 times as fast where libraries do not pad, less where they do",
        speedup=(1.05, 2.0),
        predicted=True,
    )


def tiles(subject: Subject) -> Iterator[Finding]:
    """Sizes that leave the best tiles partly empty."""
    multiples = subject.target.multiples(subject.products)
    if multiples is None:
        return
    rough = [layer for layer in _inner(subject) if _divisor_fails(layer, _TILE) and not layer.is_depthwise]
    share = _share(subject, rough)
    if share < _MOST or any(True for _ in alignment(subject)):
        return
    yield Finding(
        name="tile_alignment",
        severity="notice",
        evidence=f"{len(rough)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, have sizes that are no "
        f"multiple of {_TILE}: {_shapes(rough)}",
        why=f"Products are cut into tiles of {_TILE} to 256, which sizes that divide by {_TILE}, ideally 256, fill.",
        source=f"{LINEAR}; {CONVOLUTION}",
        advice=Advice(words=f"widths in multiples of {_TILE}, ideally 256", keeps="training"),
        expected="predicted: up to 1.3 times as fast",
        speedup=(1.0, 1.3),
        layers=tuple(layer.name for layer in rough),
        predicted=True,
    )


def first_layer(subject: Subject) -> Iterator[Finding]:
    """A first convolution of few channels that costs much."""
    unit = subject.target.multiples(subject.products)
    first = next((layer for layer in subject.layers if layer.kind == "convolution"), None)
    if unit is None or first is None or first.inputs >= unit[0] or _share(subject, [first]) < 2 * _MUCH:
        return
    if first.inputs in (3, 4) and first.stride == 2:
        return  # padded to 4 channels, which is enough with this stride
    yield Finding(
        name="first_layer_channels",
        severity="notice",
        evidence=f"{first.name} ({first.shape}, stride {first.stride}) has {first.inputs} input channels and "
        f"{_share(subject, [first]):.0%} of the FLOPs",
        why=f"It is padded to {unit[0]} channels, or to 4 with a stride of 2; the rest of each product is zeros.",
        source=CONVOLUTION,
        advice=Advice(words="a stride of 2, or fewer filters in the first layer", keeps="training"),
        expected="predicted: that layer's time, partly",
        speedup=(1.0, 1.1),
        layers=(first.name,),
        predicted=True,
    )


def memory_bound(subject: Subject) -> Iterator[Finding]:
    """Matrix products that wait for memory."""
    ridge = subject.target.ridge(subject.products)
    samples, each = subject.plan.micro_batch_size, BYTES[subject.products]
    if ridge is None:
        return
    bound = [layer for layer in subject.layers if layer.intensity(samples, each) < ridge]
    share = _share(subject, bound)
    if share < _MOST:
        return
    small = [f"a micro-batch of {samples}"] if samples <= _COMPUTE_BOUND["batch"] else []
    widths = [layer for layer in bound if min(layer.inputs, layer.outputs) <= _COMPUTE_BOUND["batch"]]
    small += [f"{len(widths)} layers with {_COMPUTE_BOUND['batch']} or fewer features on a side"] if widths else []
    title = subject.target.machine.device_name
    yield Finding(
        name="memory_bound_layers",
        severity="notice",
        evidence=f"{len(bound)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, do fewer than the "
        f"{ridge:.0f} FLOPs a byte that keep {title} busy ({subject.products}): {_intensities(bound, samples, each)}"
        f"{'; ' + ', '.join(small) if small else ''}",
        why="Below that intensity the units wait for memory; batch and width above 128 usually are above it.",
        source=f"{LINEAR}; {INTENSITY}",
        advice=Advice(
            words="larger batch.micro_size or wider layers"
            + "; model.compile=true moves fewer bytes between them" * ("model.compile" not in subject.plan.unused),
            keeps="training",
        ),
        expected="predicted: time goes with bytes, not with FLOPs, until sizes grow",
        speedup=(1.0, 1.5),
        layers=tuple(layer.name for layer in bound),
        predicted=True,
    )


def depthwise(subject: Subject) -> Iterator[Finding]:
    """Convolutions that filter each channel by itself, as MobileNet's and EfficientNet's."""
    separate = [layer for layer in subject.layers if layer.is_depthwise]
    moved = sum((layer.read + layer.written) * layer.calls for layer in subject.layers)
    share = sum((layer.read + layer.written) * layer.calls for layer in separate) / moved if moved else 0.0
    if not subject.target.is_gpu or share < 0.2:
        return
    yield Finding(
        name="depthwise_convolutions",
        severity="notice",
        evidence=f"{len(separate)} depthwise convolutions have {_share(subject, separate):.0%} of the FLOPs and "
        f"{share:.0%} of what layers read and write: {named([layer.name for layer in separate])}",
        why="A filter for each channel does few operations for each number it reads: a GPU waits for memory.",
        source=f"{MEMORY_LIMITED}; {INTENSITY}",
        advice=Advice(
            words="judge by time, not by FLOPs; a network of full convolutions (timm's regnet, a resnet) is often "
            "faster for the same accuracy",
            keeps="training",
        ),
        expected="predicted: far from the device's peak",
        speedup=(1.0, 1.5),
        layers=tuple(layer.name for layer in separate),
        predicted=True,
    )


def recurrent_sizes(subject: Subject) -> Iterator[Finding]:
    """Recurrent layers of sizes that matrix units do not take, or of little work."""
    multiples = subject.target.multiples(subject.products)
    found = [layer for layer in subject.layers if layer.kind == "recurrent"]
    if multiples is None or not found:
        return
    unit, batch = multiples[0], subject.plan.micro_batch_size
    odd = [layer for layer in found if layer.outputs % unit or layer.inputs % unit]
    small = [layer for layer in found if layer.outputs <= _COMPUTE_BOUND["hidden"]]
    said = [f"{_shapes(odd)} no multiple of {unit}"] if odd else []
    said += [f"a micro-batch of {batch} is no multiple of {unit}"] if batch % unit else []
    said += [f"a micro-batch of {batch}, 128 or fewer"] if batch <= _COMPUTE_BOUND["batch"] else []
    said += [f"{_shapes(small)}, 256 or fewer"] if small else []
    if not said:
        return
    yield Finding(
        name="recurrent_sizes",
        severity="slows" if odd or batch % unit else "notice",
        evidence="; ".join(said),
        why="Each time step is one small product: sizes that divide by 8 (fp16) or 4 (TF32), a batch above 128 and a "
        "hidden size above 256 keep the device busy.",
        source=RECURRENT,
        advice=Advice(
            words=f"hidden sizes in multiples of {_TILE}, a batch above 128 in multiples of {unit}", keeps="training"
        ),
        expected="predicted: up to 2 times as fast for these layers",
        speedup=(1.0, 2.0),
        layers=tuple(layer.name for layer in found),
        predicted=True,
    )


def recurrent_cells(subject: Subject) -> Iterator[Finding]:
    """Recurrences that are called step by step in Python."""
    cells = [layer for layer in subject.layers if layer.kind == "recurrent cell" and layer.calls > 1]
    if not cells:
        return
    shown = [f"{layer.name} {layer.calls} times" for layer in cells]
    yield Finding(
        name="recurrent_cells",
        severity="slows",
        evidence=f"cells called one time step after the other: {named(shown)}",
        why="Recurrent operations can be parallelised, and cuDNN's implementations do: one call for a sequence.",
        source=RECURRENT,
        advice=Advice(words="nn.LSTM or nn.GRU over the sequence instead of their cells", keeps="rounding"),
        expected="2 to 10 times as fast for these layers",
        speedup=(1.5, 4.0),
        layers=tuple(layer.name for layer in cells),
    )


def _inner(subject: Subject) -> list[Layer]:
    """The layers but for the first convolution, whose channels are those of images, and recurrent ones."""
    found = [layer for layer in subject.layers if layer.kind in ("linear", "convolution")]
    first = next((layer for layer in found if layer.kind == "convolution"), None)
    return [layer for layer in found if layer is not first or layer.inputs > 4]


def _divisor_fails(layer: Layer, unit: int) -> bool:
    if layer.is_depthwise:
        return layer.outputs % unit != 0
    return layer.inputs // layer.groups % unit != 0 or layer.outputs // layer.groups % unit != 0


def _share(subject: Subject, layers: list[Layer]) -> float:
    names = {layer.name for layer in layers}
    return subject.share(lambda layer: layer.name in names)


def _shapes(layers: list[Layer]) -> str:
    heaviest = sorted(layers, key=lambda layer: -layer.flops)
    return named([f"{layer.name} {layer.shape}" for layer in heaviest], 3)


def _intensities(layers: list[Layer], samples: int, each: int) -> str:
    heaviest = sorted(layers, key=lambda layer: -layer.flops)
    return named([f"{layer.name} {layer.intensity(samples, each):.0f}" for layer in heaviest], 3)


def _example(layer: Layer, unit: int) -> str:
    sizes = [size for size in (layer.inputs, layer.outputs) if size % unit]
    return ", ".join(f"{size} to {-(-size // unit) * unit}" for size in dict.fromkeys(sizes)) or "groups too"
