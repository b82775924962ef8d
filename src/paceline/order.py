"""The order of samples for anybody's loop: the batch sampler of a :class:`torch.utils.data.DataLoader`.

The order is a pure function of (seed, epoch, step), the one that Paceline trains in. So a position in the data is one
number, which the loop counts: loaders read ahead, and only the loop knows which batches it has used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler

from paceline.data.order import StepGeometry
from paceline.data.shard_order import ShardSizes
from paceline.distributed.current import current_world
from paceline.errors import CheckpointError, DataError
from paceline.parsing.arguments import checked_step, shown, whole


class BatchOrder(BatchSampler):
    """Batches of a shuffled data set, a part of each for every rank; continues at ``step``.

    An epoch is a permutation of ``range(samples)``. Each step takes the next ``batch_size`` samples of it, and each
    rank an equal part of these, up to one sample. The samples of a step do not depend on the number of ranks.

    ``step`` is the number of batches used so far, over all epochs. The loop counts it, as in the example: with workers
    or prefetching, batches are read long before they are used. Iterating yields the rest of the epoch in which ``step``
    lies, lists of int with about ``batch_size / world_size`` ids. Once the last batch is counted, the next iteration is
    the next epoch; :meth:`set_epoch` is only needed if epochs end early, or steps are not counted.

    Every rank gets the same number of batches. If an epoch's last batch has fewer samples than there are ranks, ranks
    without one repeat a sample of that batch; ``drop_last=True`` leaves incomplete batches out.

    Libraries that share batches among ranks themselves (``accelerator.prepare(loader)``, Fabric without
    ``use_distributed_sampler=False``) would share them twice. With several ranks this is refused, but for Accelerate's
    ``dispatch_batches``, which cannot be used with it.

    Args:
        samples: Number of samples in the data set.
        batch_size: Samples of one step, over all ranks.
        seed: Seed of the permutations, in [0, 2**64).
        rank: This process; by default that of ``torch.distributed``, else of the environment (``RANK``), else 0.
        world_size: Number of processes; by default as for ``rank`` (``WORLD_SIZE``), else 1.
        drop_last: Whether to leave out the last batch of an epoch if it is incomplete.
        shards: ``shard_sizes`` of :class:`~paceline.shards.Shards`, to read a few files at a time.

    Attributes:
        step: Batches used so far; counted by the loop.

    Raises:
        DataError: If an argument is out of range, or there are fewer samples in a batch than ranks.
        LaunchError: If there is no such rank.

    Example:
        >>> order = BatchOrder(samples=5, batch_size=2, seed=1)
        >>> loader = torch.utils.data.DataLoader(data, batch_sampler=order, num_workers=2)
        >>> while order.step < 3 * len(order):  # three epochs
        ...     for batch in loader:
        ...         train(batch)
        ...         order.step += 1
        ...         torch.save(order.state_dict(), "order.pt")
    """

    step: int

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        shards: ShardSizes | None = None,
    ) -> None:
        self._given = rank, world_size
        self._world = current_world(rank, world_size)
        self.rank, self.world_size = self._world.rank, self._world.world_size
        self.samples, self.seed, self.drop_last = whole("samples", samples, 1), whole("seed", seed), drop_last
        self._batch_size, self.step = whole("batch_size", batch_size, 1), 0
        if self._batch_size < self.world_size:
            raise DataError(
                f"batch_size={batch_size}, but {self.world_size} rank(s) share a batch: give {self.world_size} or "
                "more.",
                key="batch_size",
                value=batch_size,
            )
        if self.seed >= 2**64:
            raise DataError(f"seed={seed}, but must be less than 2**64: give another.", key="seed", value=seed)
        if drop_last and self.samples < self._batch_size:
            raise DataError(
                f"samples={samples} fill no batch of batch_size={batch_size}: give a smaller batch_size, or "
                "drop_last=False.",
                key="batch_size",
                value=batch_size,
            )
        if self.world_size == 1:
            self.batch_size = self._batch_size  # for libraries that share batches among ranks
        if shards is not None and not isinstance(shards, ShardSizes):
            raise DataError(
                f"shards is {shown(shards)}; give the shard_sizes of paceline.shards.Shards.",
                key="shards",
                value=shards,
            )
        if shards is not None and shards.ends[-1] != self.samples:
            raise DataError(
                f"samples={samples}, but the shards have {shards.ends[-1]}: give the same.",
                key="samples",
                value=samples,
            )
        self._geometry = StepGeometry(
            seed=self.seed,
            samples=self.samples,
            global_batch_size=self._batch_size,
            logical_ranks=self.world_size,
            shards=shards,
        )
        self._expect_from(0)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_size":  # read by whatever shares the batches among ranks
            raise DataError(
                f"BatchOrder has already shared its batches among {self.world_size} ranks, and they were about to be "
                "shared again: use prepare_data_loader(loader, num_processes=1, process_index=0) of Accelerate, "
                "or use_distributed_sampler=False of Fabric."
            )
        raise AttributeError(f"'BatchOrder' object has no attribute '{name}'")

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, on every rank."""
        return self.samples // self._batch_size if self.drop_last else -(-self.samples // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's sample ids of each batch from ``step`` to the end of its epoch.

        Raises:
            DataError: If the epoch was already read to its end, and neither ``step`` nor :meth:`set_epoch` moved on; or
                if the ranks have formed a group since the order was made.
        """
        if (world := current_world(*self._given)) != self._world:
            raise DataError(
                f"BatchOrder was made for {self.world_size} rank(s), but there are {world.world_size} now: make it "
                "after the process group is formed."
            )
        if self.step == self._begin and self._begin % len(self) + self._read == len(self):
            raise DataError(
                f"Epoch {self.epoch} was read to its end and would be repeated: count each batch with order.step += 1, "
                "or call set_epoch() before each epoch."
            )
        self._expect_from(self.step)
        epoch, first = divmod(self.step, len(self))
        for position in range(first, len(self)):
            (part,) = self._geometry.slices(self._geometry.epochs.first_step(epoch) + position, self._world)
            self._read += 1
            yield part.ids.tolist()

    @property
    def epoch(self) -> int:
        """The epoch in which ``step`` lies, from 0."""
        return self.step // len(self)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch, unless ``step`` is already within it.

        Raises:
            DataError: If that epoch is over; to repeat it, set ``step``.
        """
        if (epoch := whole("epoch", epoch)) < self.epoch:
            raise DataError(
                f"set_epoch({epoch}) would repeat an epoch, since {self.step} batches put the order in epoch "
                f"{self.epoch}: begin with epoch {self.epoch} (for a loader of Accelerate, loader.set_epoch), or set "
                "order.step.",
                key="epoch",
                value=epoch,
            )
        self.step = max(self.step, epoch * len(self))
        self._expect_from(self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the batches used, and what they were cut from.

        Raises:
            DataError: If batches were read and none was counted, or more were counted than read.
        """
        counted = self.step - self._begin
        if self._read and not 1 <= counted <= self._read:
            raise DataError(
                f"The loop has counted {counted} of {self._read} batches read from step {self._begin} on: count each "
                "batch that it has used, once, with order.step += 1 before it saves."
            )
        return {"step": self.step, **self._facts()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a :class:`CheckpointError` if the state is that of another order, without changing anything."""
        checked_step(state, "an order")
        for name, value in {"shards": None, **self._facts()}.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"The order was saved with {name}={state.get(name)}, but has {name}={value} now: give it the value "
                    "and the data it was saved with, or do not load it.",
                    key=name,
                    value=value,
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that a saved order had used; the number of ranks may differ.

        Raises:
            CheckpointError: If it is the state of another order.
        """
        self.check_state_dict(state)
        self.step = state["step"]
        self._expect_from(self.step)

    def _facts(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "batch_size": self._batch_size,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "shards": None if self._geometry.shards is None else self._geometry.shards.facts,
        }

    def _expect_from(self, step: int) -> None:
        """Begin to compare the batches that are read with those that the loop counts."""
        self._begin, self._read = step, 0
