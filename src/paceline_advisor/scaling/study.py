"""Prediction of a recipe's scaling: throughput, efficiency, hours and cost on 1 to N devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from paceline.command import Log
from paceline.errors import PacelineError, RecipeError
from paceline.host.devices import find_device
from paceline.host.machine import available_cores, busy_message
from paceline.metrics.intervals import Interval
from paceline.models.ceilings import Ceilings, tf32_of
from paceline.pages.charts import log_axis
from paceline.pages.page import Chart, Table
from paceline.pages.shown import Shown
from paceline.parsing.units import format_bytes, format_seconds
from paceline.plan.compute import WITH_GRAPHS
from paceline.plan.strategy import replica_bytes
from paceline.plugins.registry import load
from paceline.recipe.load import LoadedRecipe, load_recipe
from paceline.recipe.schema import Recipe
from paceline_advisor import Json, as_json, frozen, picked
from paceline_advisor.apply import with_values
from paceline_advisor.clusters import Cluster, Link
from paceline_advisor.formulas.parallel_step import (
    HOST_SECONDS,
    OWN_HOST_SECONDS,
    Cause,
    Compiled,
    Host,
    OneDevice,
    ParallelConfig,
    StepPrediction,
    Strategy,
    predict,
)
from paceline_advisor.formulas.scaling import Fabric
from paceline_advisor.launches import check_alone
from paceline_advisor.scaling.batches import BatchTable, fit_table
from paceline_advisor.scaling.commands import Scale
from paceline_advisor.scaling.network import ScaledRun, describe, of_parameters
from paceline_advisor.scaling.room import (
    Share,
    cluster_of,
    in_passes,
    is_here,
    least_steps,
    measure,
    memory_of,
    probe,
    shares_of,
)
from paceline_advisor.traces import error_bars, trace


@frozen
class LoopOverhead:
    """What a training loop asks of its host.

    Attributes:
        waits: How often its host waits for the device per step, by precision.
        seconds_per_sample: Time of one core to read and augment an image, with all cores busy.
        seconds_per_tensor: Additional host time of DDP per parameter tensor.
        loaders_per_device: Loader processes of each device, by cluster; on other clusters, one for each core.
    """

    waits: Mapping[str, int]
    seconds_per_sample: float
    seconds_per_tensor: float = HOST_SECONDS
    loaders_per_device: Mapping[str, int] = field(default_factory=dict)


LOOPS: Mapping[str, LoopOverhead] = {
    # It waits for fp16's overflow check only; benchmarks/results/input-pipeline-folder, ddp-host.
    "paceline": LoopOverhead(
        waits={"fp32": 0, "bf16": 0, "fp8": 0, "fp16": 1},
        seconds_per_sample=1.37e-3,
        seconds_per_tensor=OWN_HOST_SECONDS,
    ),
    # Two waits: the step's own synchronize and, in mixed precision, the gradient scaler's check. Image times are those
    # of torchvision and Pillow in Paceline's benchmark. From NVIDIA DeepLearningExamples, PyTorch/Classification/
    # ConvNets: image_classification/training.py, configs.yml; benchmarks/results/input-pipeline-folder.
    "nvidia-convnets": LoopOverhead(
        waits={"fp32": 1, "bf16": 2, "fp8": 2, "fp16": 2},
        seconds_per_sample=2.65e-3,
        loaders_per_device={"dgx-1": 8, "dgx-1-32gb": 8, "dgx-2": 8, "dgx-a100": 10, "dgx-a100-40gb": 10},
    ),
}

_HOUR = 3600

MOST_HERE = 16
# Published rates are up to 1.13 times linear scaling: one device's rate is uncertain too.
_MOST_OF_LINEAR = 1.25
_ROUNDS = 5
_COLUMNS = ("strategy", "batch", "passes", "samples/s", "90 % range", "efficiency", "time", "cost", "limited by")
_REASONS: Mapping[Cause, str] = {
    "communication": "gradients between {many} cost {part}; accumulate more, compress them, or use a faster network",
    "sharing": "sharing a node's power, memory and host costs {part}, as on most published machines",
    "host": "the host's work for each tensor costs {part}; bf16 instead of fp16 avoids most of it",
    "update": "the optimizer's update costs {part}, since fewer passes share it; accumulate more",
    "waiting": "waiting for the slowest {one} costs {part}",
    "data": "the nodes' cores cannot decode more samples, which costs {part}; pack the data, or add cores",
    "launching": "each {one}'s share is so small that launching its kernels costs {part}; give each {one} more samples",
    "cores": "the processes share the machine's cores, which costs {part}; use fewer",
}
_LOSS_TO_EXPLAIN = 0.05


@frozen
class ScalingRow:
    """The prediction for one size and strategy.

    Attributes:
        strategy: How the devices share the step; ``single`` for one.
        prediction: The predicted step.
        batch: Samples of a step, at most those of the data.
        passes: Passes of each device per step.
        hours: Hours of the whole training; None if its length is unknown.
        paid: Devices that are paid for: whole nodes, unless nodes are shared.
        cost: Cost of the whole training in dollars; None without a price.
        measured: Measured samples per second, if it was run.
    """

    strategy: str
    prediction: StepPrediction
    batch: int
    passes: int
    hours: float | None
    paid: int
    cost: float | None
    measured: Interval | None = None

    @property
    def error(self) -> float | None:
        """How far the predicted rate is above the measured one, relative to it."""
        return None if self.measured is None else self.prediction.rate / self.measured.middle - 1

    def to_json(self) -> Json:
        """Return the row as JSON values."""
        found = self.prediction
        low, high = found.ends
        return {
            "devices": found.devices,
            "strategy": self.strategy,
            "global_batch": self.batch,
            "accumulation_steps": self.passes,
            "samples_per_second": found.rate,
            "samples_per_second_low": low,
            "samples_per_second_high": high,
            "efficiency": found.efficiency,
            "step_seconds": found.seconds,
            "parts_seconds": found.parts,
            "limit": found.limit,
            "hours": self.hours,
            "paid_devices": self.paid,
            **picked(self, "cost", "error"),
            "measured_samples_per_second": self.measured,
        }


@frozen
class ScaleReport:
    """Result of the prediction.

    Attributes:
        recipe: Name of the recipe.
        cluster: The cluster.
        given: What is given, by its name: one device's rate, and a rate of several.
        basis: Source of one device's rate, in words.
        is_bound: Whether that rate is only an upper bound; all rates are then upper bounds.
        precision: The precision.
        parameters: Number of the network's trained parameters.
        rows: One row per size and strategy.
        price_per_gpu_hour: Dollars, if known.
        notices: Assumptions.
        shown: Strategies in the table and the chart.
    """

    recipe: str
    cluster: Cluster
    basis: str
    is_bound: bool
    precision: str
    parameters: int
    rows: tuple[ScalingRow, ...]
    price_per_gpu_hour: float | None
    given: Mapping[str, str]
    notices: tuple[str, ...] = field(default_factory=tuple)
    shown: tuple[str, ...] = ("single", "ddp", "fsdp")

    @property
    def shown_rows(self) -> list[ScalingRow]:
        """The rows in the table and the chart."""
        return [row for row in self.rows if row.strategy in self.shown]

    def to_json(self) -> Json:
        """Return the report as JSON values."""
        return dict(as_json(vars(self)))

    def __paceline__(self) -> Shown:
        """Show each size and strategy with its rate, range, hours and cost."""
        measured = any(row.measured is not None for row in self.rows)
        one, devices = device_words(self.cluster)
        columns = (devices, *_COLUMNS, *(("measured", "error") if measured else ()))
        rows = []
        for row in self.shown_rows:
            found = row.prediction
            cells = [
                *(str(found.devices), row.strategy, f"{row.batch:,}", str(row.passes), _shown_rate(found.rate)),
                "" if found.devices == 1 else " – ".join(map(_shown_rate, found.ends)),
                *(f"{found.efficiency:.1%}", "" if row.hours is None else shown_hours(row.hours)),
                *("" if row.cost is None else f"${row.cost:,.2f}", found.limit),
            ]
            if measured:
                cells.append("" if row.measured is None else _shown_rate(row.measured.middle))
                cells.append("" if row.error is None else f"{row.error:+.1%}")
            rows.append(cells)
        meaning = "  The range held 90 % of the published rates of networks that were left out of the fit."
        if self.is_bound:
            meaning = (
                f"  These are upper bounds for one {one} and its multiples, not expected rates: give one {one}'s "
                "--throughput."
            )
        return Shown(
            title=f"{self.recipe} ({self.parameters:,} parameters, {self.precision}) on {self.cluster.title}",
            blocks=[
                "  Given",
                dict(self.given),
                *(f"  note: {notice}" for notice in self.notices),
                filled_table(columns, rows, "Predicted"),
                *([f"  {why}"] if (why := self.why_inefficient()) else []),
                meaning,
            ],
            on_page=[self._chart(devices)],
        )

    def why_inefficient(self) -> str:
        """Return the main reason for the lowest efficiency as a sentence; empty if little is lost."""
        row = min(self.shown_rows, key=lambda each: each.prediction.efficiency)
        found = row.prediction
        if found.efficiency > 1 - _LOSS_TO_EXPLAIN or found.limit == "computing":
            return ""
        one, devices = device_words(self.cluster)
        seconds = found.parts[found.limit]
        part = f"{seconds / found.seconds:.0%} of a step ({1000 * seconds:.3g} of {1000 * found.seconds:.3g} ms)"
        return (
            f"{found.devices} {devices} with {row.strategy} reach {found.efficiency:.0%} of linear scaling: "
            f"{_REASONS[found.limit].format(part=part, one=one, many=devices)}."
        )

    def _chart(self, devices: str) -> Chart:
        """Return a chart of throughput by size: predicted, its range, measured, and linear scaling."""
        traces: list[Json] = []
        shared = dict.fromkeys(row.strategy for row in self.shown_rows if row.prediction.devices > 1)
        for strategy in shared or {"single": None}:
            rows = [row for row in self.rows if row.strategy in (strategy, "single")]
            found = [row.prediction for row in rows]
            bars = error_bars((each.ends[0], each.rate, each.ends[1]) for each in found)
            rates = [(each.devices, each.rate) for each in found]
            traces.append(trace("lines+markers", strategy, rates, error_y=bars))
            if points := [(row.prediction.devices, row.measured.middle) for row in rows if row.measured]:
                marker = {"symbol": "x", "size": 9}
                traces.append(trace("markers", f"{strategy}, measured", points, marker=marker))
        one, sizes = self.rows[0].prediction, sorted({row.prediction.devices for row in self.rows})
        line = {"color": "var(--muted)", "dash": "dot", "width": 1.5}
        ideal = [(each, one.rate / one.devices * each) for each in sizes]
        traces.append(trace("lines", "linear", ideal, line=line))
        ticks = {"tickmode": "array", "tickvals": sizes, "ticktext": [str(each) for each in sizes]}
        return Chart(
            title="Throughput",
            traces=traces,
            layout={
                "xaxis": {"title": devices, "type": "log", **ticks},
                "yaxis": log_axis("samples/s", [rate for each in traces for rate in each["y"]]),
            },
            description=f"Samples per second by the number of {devices}; bars show the range of the prediction.",
        )


def device_words(cluster: Cluster) -> tuple[str, str]:
    """Return what to call one device of a cluster, and several: CPUs run several processes."""
    return ("process", "processes") if cluster.shares_cores else ("GPU", "GPUs")


def filled_table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str) -> Table:
    """Return a table without the columns that are empty in every row."""
    filled = [index for index in range(len(columns)) if any(cells[index] != "" for cells in rows)]
    return Table(
        columns=[columns[index] for index in filled],
        rows=[[cells[index] for index in filled] for cells in rows],
        caption=caption,
    )


def shown_hours(hours: float) -> str:
    """Format hours for people: ``4.6 s``, ``32 min 00 s``, ``1 h 06 min``, ``1,234 h``."""
    return f"{hours:,.0f} h" if hours >= 100 else format_seconds(_HOUR * hours)


def _shown_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def scale(options: Scale, log: Log) -> ScaleReport | BatchTable:
    """Predict the scaling, and measure as far as this machine allows; or fit a table of batches.

    Raises:
        PacelineError: If a setting is unknown, or settings are incompatible.
    """
    if options.batches is not None:
        return fit_table(options.batches, options.at)
    if options.parameters is not None:
        # The recipe gives DDP's and FSDP's defaults, and the precision.
        loaded = replace(load_recipe("synthetic"), name="a network that is not at hand")
        subject = of_parameters(round(options.parameters), options.samples or 0)
        return Scaling(loaded, options, log, subject).report()
    loaded = options.load()
    report = Scaling(loaded, options, log).report()
    return replace(report, notices=(*loaded.notices, *report.notices))


class Scaling:
    """A recipe on a cluster.

    Args:
        loaded: The recipe.
        options: What to predict.
        log: Receives progress messages.
        subject: Known properties of its network, if any.

    Attributes:
        cluster: The cluster.
        device: Its accelerator; None if it is not in the table.
        precision: The precision.
        subject: Properties of the network.
        shares: Each device's part of a step, by number of devices. It may be split into other passes before
            :meth:`report`.
    """

    def __init__(self, loaded: LoadedRecipe, options: Scale, log: Log, subject: ScaledRun | None = None) -> None:
        recipe = loaded.recipe
        if recipe.parallel.exact:
            raise RecipeError("parallel.exact=true is not predicted: only ddp and fsdp are; turn it off.")
        self._recipe, self._name, self._options, self._log = recipe, loaded.name, options, log
        self.cluster = cluster_of(options.cluster, recipe, options.sizes)
        self.device = None if self.cluster.device is None else find_device(self.cluster.device)
        is_own = getattr(load("tasks", recipe.task, RecipeError), "is_own", True)
        has_bf16 = self.device is not None and self.device.peak("bf16") is not None
        automatic = "bf16" if has_bf16 and not is_own else "fp32"
        self.precision = automatic if recipe.train.precision == "auto" else recipe.train.precision
        self._check()
        self.subject = describe(recipe, options.samples) if subject is None else subject
        why, strategies = self.subject.unsharded, options.strategies
        if why and strategies == ("fsdp",):
            raise RecipeError(f"--strategy fsdp {why}; ask for ddp.")
        self._strategies = tuple(each for each in strategies if each != "fsdp") if why else strategies
        if len(self._strategies) == 1:  # measured too, whatever the recipe has
            self._recipe = with_values(recipe, {"parallel.strategy": self._strategies[0]})
        loop, cluster = LOOPS[options.loop], self.cluster
        seconds_per_sample = loop.seconds_per_sample if self.subject.decodes else 0.0
        if options.cpu_ms_per_sample is not None:
            seconds_per_sample = options.cpu_ms_per_sample / 1000
        self._host = Host(
            # If processes compute on the cores, the host is the device, so all its work adds to the step.
            waits=1 if cluster.shares_cores else loop.waits[self.precision],
            seconds_per_tensor=loop.seconds_per_tensor,
            seconds_per_sample=seconds_per_sample,
            loaders_per_device=loop.loaders_per_device.get(cluster.name),
            cores_per_device=cluster.cores_per_device,
            shares_cores=cluster.shares_cores,
        )
        shares, batch = shares_of(recipe, options.sizes, options.batch_per_gpu), options.one_gpu_batch
        if batch is not None:
            shares = {size: in_passes(share, batch) for size, share in shares.items()}
        self.shares = shares

    def _check(self) -> None:
        options, cluster = self._options, self.cluster
        if cluster.max_devices is not None and max(options.sizes) > cluster.max_devices:
            raise RecipeError(
                f"--world-sizes asks for {max(options.sizes)} devices, but {cluster.title} has {cluster.max_devices}; "
                "ask for fewer, or name a cluster (--cluster)."
            )
        if cluster.shares_cores and options.cluster is None and max(options.sizes) > MOST_HERE:
            raise RecipeError(
                f"--world-sizes {max(options.sizes)}: without --cluster, the link between processes of this machine is "
                f"measured with that many, at most {MOST_HERE}; name a cluster, or ask for fewer."
            )
        if options.measure and options.cluster is not None and not is_here(cluster.device):
            raise RecipeError(
                f"--measure runs on this machine, which is not {cluster.title}; leave out --measure, or --cluster."
            )

    def report(self) -> ScaleReport:
        """Compute the prediction."""
        options, notices = self._options, list(self.subject.notices)
        busy = busy_message()  # before this process starts its own
        alone, together = self._measured()
        notices += [busy] if busy and (alone or together or options.measure) else []
        ones, basis, is_bound = self._basis(alone)
        measured_strategy = "fsdp" if self._recipe.parallel.strategy == "fsdp" else self._strategies[0]
        links = {}
        if self.cluster.shares_cores and options.cluster is None:
            links = {size: probe(size) for size in options.sizes if size > 1}
        price = options.price_per_gpu_hour or self.cluster.price_per_device_hour
        factor, given = 1.0, {"one device": basis}
        if (measured := options.gpus_measured) is not None:
            size, rate = measured.gpus, measured.rate
            row = self._row(self.shares[size], measured_strategy, ones[size], links.get(size), price, 1.0)
            alone_rate = row.prediction.single_rate
            beyond, (single, many) = rate / (size * alone_rate), device_words(self.cluster)
            if beyond > _MOST_OF_LINEAR and not is_bound:
                raise RecipeError(
                    f"--gpus-measured {size}:{rate:g} is {beyond:.3g} times {size} {many} of {alone_rate:g} samples/s; "
                    f"at most {_MOST_OF_LINEAR} times is accepted: give the rate of all {many} together, and of one "
                    f"{single}."
                )
            if rate < alone_rate:
                notices.append(f"{size} devices were measured slower than one: check both rates")
            factor = row.prediction.factor_for(rate)
            together |= {size: Interval(rate, rate, rate, 1)}
            given[f"{size} devices"] = (
                f"{_shown_rate(rate)} samples/s; {_shown_rate(row.prediction.rate)} were predicted, so the costs of "
                f"several devices are multiplied by {factor:.2g}"
            )
        rows = [
            replace(
                self._row(share, strategy, ones[size], links.get(size), price, factor),
                measured=together.get(size) if strategy == measured_strategy else None,
            )
            for size, share in self.shares.items()
            for strategy in (self._strategies if size > 1 else self._strategies[:1])
        ]
        if price is not None and any(row.paid > row.prediction.devices for row in rows):
            each = f"{self.cluster.devices_per_node} {device_words(self.cluster)[1]}"
            notices.append(f"costs are those of whole nodes of {each}; --shared-node prices only those used")
        if self._strategies != options.strategies:
            notices.append(f"FSDP {self.subject.unsharded}")
        if why := self._why_no_fsdp():
            notices.append(why)
        if options.has_figure and options.one_gpu_batch is None and options.batch_per_gpu is None:
            notices.append(f"one device's rate is assumed to be for {self._figure_batch} samples; see --one-gpu-batch")
        if self._host.seconds_per_sample and self._host.cores_per_device is None:
            notices.append(f"{self.cluster.title}: its processor cores are unknown; data is assumed to arrive in time")
        return ScaleReport(
            recipe=self._name,
            cluster=self.cluster,
            basis=basis,
            is_bound=is_bound,
            precision=self.precision,
            parameters=self.subject.numbers.trained,
            rows=tuple(rows),
            price_per_gpu_hour=price,
            given=given,
            notices=tuple(notices),
            shown=("single", "ddp") if why else ("single", "ddp", "fsdp"),
        )

    def _why_no_fsdp(self) -> str:
        """Return why FSDP's rows are only in the JSON document: a replica fits easily; empty if they are shown."""
        memory = memory_of(self.cluster, self.device, max(self.shares))
        replica = replica_bytes(self._recipe, self.subject.numbers)
        is_wanted = "ddp" not in self._strategies or self._recipe.parallel.strategy == "fsdp"
        if is_wanted or "fsdp" not in self._strategies or memory is None or replica >= memory / 2:
            return ""
        taken = f"{format_bytes(replica)} of {format_bytes(memory)}"
        return f"FSDP is left out, since a replica's state takes {taken}; --strategy fsdp shows it"

    def _row(
        self, share: Share, strategy: Strategy, one: OneDevice, link: Link | None, price: float | None, factor: float
    ) -> ScalingRow:
        size = share.devices
        host = replace(self._host, threads=self._threads(size)) if self._host.shares_cores else self._host
        config = ParallelConfig(
            strategy=strategy,
            micro_batch=share.micro_batch,
            passes=share.passes,
            bucket_bytes=self._recipe.parallel.bucket_cap_mb * 2**20,
            units_per_device=None if self.device is None else self.device.multiprocessors,
            regathered=self._recipe.parallel.reshard_after_forward,
            # On cores, communication competes with computation for all of them.
            taken=1.0 if self._host.shares_cores else None,
            launched=self.subject.launches.share(_compiled(self._recipe)),
            parameters=self.subject.numbers.trained,
            memory_bytes_per_second=None if self.device is None else self.device.bytes_per_second,
        )
        found = predict(self.subject.network, one, fabric_of(self.cluster, size, link), host, config, factor=factor)
        epoch = self.subject.samples
        batch = min(found.samples, epoch) if epoch else found.samples
        hours = self._samples(batch) / found.rate / _HOUR if epoch else None
        paid = size if self._options.shared_node else self.cluster.nodes(size) * self.cluster.devices_per_node
        return ScalingRow(
            strategy="single" if size == 1 else strategy,
            prediction=found,
            batch=batch,
            passes=share.passes,
            hours=hours,
            paid=paid,
            cost=None if price is None or hours is None else hours * paid * price,
        )

    def _samples(self, batch: int) -> float:
        """Return the samples of the whole training; of one epoch without a recipe."""
        duration, epoch = self._recipe.train.duration, self.subject.samples
        if self._options.parameters is not None:
            return epoch
        if duration.unit == "epochs":
            return duration.value * epoch
        return duration.to_steps(samples_per_epoch=epoch, global_batch_size=batch) * batch

    def _threads(self, size: int) -> int:
        threads = self._recipe.parallel.threads
        return threads if threads != "auto" else max(1, available_cores() // size)

    def _measured(self) -> tuple[dict[int, OneDevice], dict[int, Interval]]:
        """Measure one device's part and several devices, if requested and if the cluster is this machine."""
        options = self._options
        runs_here = options.cluster is None or is_here(self.cluster.device)
        needs_figure = not options.has_figure and runs_here
        if not needs_figure and not options.measure:
            return {}, {}
        check_alone("measuring how a recipe scales")
        most = self.cluster.max_devices or max(options.sizes)
        return measure(
            self._recipe,
            self.shares if needs_figure else {},
            {size: share for size, share in self.shares.items() if size <= most and options.measure},
            {size: self._threads(size) for size in options.sizes if self.cluster.shares_cores},
            options.rounds or _ROUNDS,
            self._log,
        )

    def _basis(self, alone: dict[int, OneDevice]) -> tuple[dict[int, OneDevice], str, bool]:
        """Return one device's step for each size, its source, and whether it is only a bound."""
        options = self._options
        if options.has_figure:
            batch, seconds = self._figure_batch, options.step_seconds
            if options.throughput is not None:
                seconds = batch / options.throughput
            assert seconds is not None  # has_figure
            # Without a batch, the rate is that of the recipe's own step on one device.
            is_own_step = options.throughput is not None and options.one_gpu_batch is None and 1 in self.shares
            one = OneDevice(seconds=seconds, samples=batch, passes=self.shares[1].passes if is_own_step else 1)
            basis = f"{_shown_rate(batch / seconds)} samples/s in steps of {batch:,}"
            return dict.fromkeys(self.shares, one), basis, False
        if alone:
            return alone, f"one process measured here, in {options.rounds or _ROUNDS} rounds", False
        return self._bounds()

    @property
    def _figure_batch(self) -> int:
        """Samples of the step that the given rate or time refers to."""
        batch = self._options.one_gpu_batch or self._options.batch_per_gpu
        return batch or self.shares[min(self.shares)].micro_batch

    def _bounds(self) -> tuple[dict[int, OneDevice], str, bool]:
        """Return lower bounds of the device's time for each size, from its compute peaks and its memory bandwidth."""
        device, work = self.device, self.subject.work
        if device is None or work is None:
            raise RecipeError(
                f"the speed of one device of {self.cluster.title} is unknown; give --throughput SAMPLES-PER-SECOND or "
                "--step-seconds SECONDS."
            )
        ceilings = Ceilings(device, tf32_of(self._recipe.train.float32_matmul))
        flops = {self.precision: work.model_flops}
        if self.precision == "fp32":
            flops = ceilings.flops_by_precision(work.model_works)
        peaks = " and ".join(f"{name} peak of {ceilings.peak(name) / 1e12:.0f} TFLOP/s" for name in flops)
        try:
            ones, bound = least_steps(self._recipe, self.shares, device), f"its dense {peaks} and its memory bound it"
        except PacelineError:  # a network that cannot run without real values
            each = sum(count / ceilings.peak(name) for name, count in flops.items()) / self.subject.work_samples
            ones = {
                size: OneDevice(seconds=each * share.micro_batch, samples=share.micro_batch, is_bound=True)
                for size, share in self.shares.items()
            }
            bound = f"its dense {peaks} bounds it"
        basis = f"no rate of one {device.title} is known: {bound}; real rates are well below, and scale better"
        return ones, basis, True


def _compiled(recipe: Recipe) -> Compiled:
    """Return how compilation reduces kernel launches; ``no`` for an unknown back-end."""
    model = recipe.model
    if not model.compile:
        return "no"
    if model.compile_backend == "inductor":
        return "graphs" if model.compile_mode in WITH_GRAPHS else "fused"
    return "graphs" if model.compile_backend == "cudagraphs" else "no"


def fabric_of(cluster: Cluster, devices: int, link: Link | None = None) -> Fabric:
    """Return the links among devices of a cluster.

    Args:
        cluster: The cluster.
        devices: Number of participating devices.
        link: Measured link, which replaces that of the cluster's nodes.
    """
    return Fabric(
        devices=devices,
        per_node=cluster.devices_per_node,
        within=link or cluster.within,
        network=cluster.network,
        # gloo has only one algorithm for sums of any size.
        algorithm="ring" if cluster.shares_cores else None,
    )
