"""Everything the doctor looks for, in the order in which it is told where nothing else decides."""

from __future__ import annotations

from paceline_advisor.doctor.checks import code, fitting, learning, loading, numerics, records, rhythm, several, shapes
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
    numerics.precision,
    numerics.slow_precision,
    numerics.channels_last,
    numerics.layout_lost,
    numerics.autotune_off,
    numerics.unfused_optimizer,
    numerics.threads,
    numerics.bias_before_batchnorm,
    # How samples come
    loading.no_workers,
    loading.too_many_workers,
    loading.unpinned,
    loading.no_persistent_workers,
    loading.drop_last,
    # Whether there is room for a step
    fitting.does_not_fit,
    # Which sizes the network has
    shapes.alignment,
    shapes.batch_alignment,
    shapes.tiles,
    shapes.first_layer,
    shapes.memory_bound,
    shapes.depthwise,
    shapes.recurrent_sizes,
    shapes.recurrent_cells,
    # What several processes would wait for
    several.unused_parameters,
    several.unused_parameter_search,
    several.construction_order,
    several.data_parallel,
    several.affinity,
    # What is done between steps
    rhythm.log_every_step,
    rhythm.evaluation_often,
    # Whether fast steps lead somewhere
    learning.no_warmup,
    learning.learning_rate,
    learning.ragged_tail,
    learning.loss_scale,
    # What a run that was made has recorded
    records.diverged,
    records.data_wait,
    records.scaler_health,
    records.slow_rank,
    records.recompilation,
)
