"""Everything the doctor looks for, in the order in which it is told where nothing else decides."""

from __future__ import annotations

from paceline_advisor.doctor.checks import code, compute, training
from paceline_advisor.doctor.subject import Check

CHECKS: tuple[Check, ...] = (
    # What the user's code does in a step
    code.debugging,
    code.synchronisation,
    code.host_tensors,
    code.debug_environment,
    code.pointwise,
    code.gradient_in_evaluation,
    # How the device computes
    compute.precision,
    compute.slow_precision,
    compute.channels_last,
    compute.layout_lost,
    compute.autotune_off,
    compute.unfused_optimizer,
    compute.threads,
    compute.bias_before_batchnorm,
    # How samples come
    code.no_workers,
    code.too_many_workers,
    code.unpinned,
    code.no_persistent_workers,
    code.drop_last,
    # Whether there is room for a step
    training.does_not_fit,
    # Which sizes the network has
    compute.alignment,
    compute.batch_alignment,
    compute.tiles,
    compute.first_layer,
    compute.memory_bound,
    compute.depthwise,
    compute.recurrent_sizes,
    compute.recurrent_cells,
    # What several processes would wait for
    training.unused_parameters,
    training.unused_parameter_search,
    training.construction_order,
    training.data_parallel,
    training.affinity,
    # What is done between steps
    training.log_every_step,
    training.evaluation_often,
    # Whether fast steps lead somewhere
    training.no_warmup,
    training.learning_rate,
    training.ragged_tail,
    training.loss_scale,
    # What a run that was made has recorded
    training.diverged,
    training.data_wait,
    training.scaler_health,
    training.slow_rank,
    training.recompilation,
)
