"""Do formulas give further figures of their papers, and the laws that hold between them?"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from paceline.metrics import critical_batch as batch
from paceline.models.roofline import utilisation
from paceline_advisor.formulas import network, scaling
from paceline_advisor.formulas.catalogue import published

# The formulas of the tables, by name.
table = SimpleNamespace(**{each.name: each.function for each in published()})
# Rajbhandari et al., arXiv:1910.02054, table 1: GB per device at stages 1, 2, 3, by parameters and devices.
ZERO_TABLE = {
    (7.5e9, 4): (52.5, 41.3, 30),
    (7.5e9, 1024): (30.1, 15.1, 0.12),
    (128e9, 16): (608, 368, 128),
    (128e9, 64): (536, 284, 32),
    (1e12, 1024): (4011, 2013, 15.6),
}


@pytest.mark.parametrize(("setting", "printed"), ZERO_TABLE.items())
def test_zero_gives_table_1_of_its_paper(setting: tuple[float, int], printed: tuple[float, ...]) -> None:
    parameters, devices = setting
    for stage, gigabytes in enumerate(printed, start=1):
        # Printed with two or three digits, cut off rather than rounded.
        assert network.zero_bytes(parameters, stage, devices) / 1e9 == pytest.approx(gigabytes, rel=0.025)


@pytest.mark.parametrize(("stage", "billions"), [(0, 2), (1, 7.6), (2, 14.4), (3, 128)])
def test_zero_gives_table_2_of_its_paper(stage: int, billions: float) -> None:
    assert table.zero_largest_parameters(32e9, stage, 64) / 1e9 == pytest.approx(billions, rel=0.01)


def test_zero_knows_no_fifth_stage() -> None:
    with pytest.raises(ValueError, match="0, 1, 2 and 3"):
        network.zero_bytes(1, 4)


def test_the_allocator_rounds_each_tensor_up() -> None:
    assert table.allocated_bytes((4, 512, 513, 0)) == 512 + 512 + 1024


# Korthikanti et al., arXiv:2205.05198, tables 3 and 5: hidden, layers, batch, GPUs, seconds, MFU and HFU in %.
KORTHIKANTI = {
    "175B": (12288, 96, 64, 64, 13.75, 51.4, 52.8),
    "1T": (25600, 128, 512, 512, 71.49, 56.3, 57.0),
}


@pytest.mark.parametrize("model", KORTHIKANTI)
def test_gpt_utilisation_is_as_the_paper_prints_it(model: str) -> None:
    hidden, layers, samples, devices, seconds, in_model, in_hardware = KORTHIKANTI[model]
    sizes = (samples, 2048, hidden, layers, 51200)
    for count, printed in ((table.iteration_flops, in_model), (table.hardware_flops, in_hardware)):
        assert 100 * utilisation(count(*sizes), seconds, 312e12, devices) == pytest.approx(printed, abs=0.3)


def test_recomputing_attention_costs_what_the_paper_says() -> None:
    assert table.selective_recompute_overhead(2048, 12288) == pytest.approx(0.027, abs=5e-4)
    assert table.selective_recompute_overhead(2048, 20480, 105) == pytest.approx(0.016, abs=5e-4)
    assert table.selective_recompute_saving(128, 2048, 20480) == pytest.approx(0.65, abs=0.005)


def test_activation_memory_follows_the_papers_table() -> None:
    sizes = (2048, 1, 12288, 96)
    unit = 2048 * 12288
    plain = table.layer_activation_bytes(*sizes)
    assert plain == unit * (34 + 80)
    assert table.layer_activation_bytes(*sizes, 8) == unit * (10 + 24 / 8 + 80 / 8)
    assert table.layer_activation_bytes(*sizes, 8, sequence_parallel=True) == plain / 8
    assert table.layer_activation_bytes(*sizes, 8, recompute="selective") == unit * 13
    both = table.layer_activation_bytes(*sizes, 8, sequence_parallel=True, recompute="selective")
    assert both == unit * 34 / 8
    assert table.layer_activation_bytes(*sizes, recompute="full") == 2 * unit
    assert table.activation_bytes(*sizes, 96, 8) == 96 * unit * (10 + 24 / 8 + 80 / 8)


def test_palm_540b_reaches_its_printed_utilisation() -> None:
    """arXiv:2204.02311, section 4.1: 46.2 % with attention, 45.7 % without, at 238.3 K tokens/s on 6144 TPU v4."""
    with_attention = table.flops_per_token(540.35e9, 118, 48, 256, 2048)
    assert table.mfu(238_300, with_attention, 275e12, 6144) == pytest.approx(0.462, abs=5e-4)
    assert table.mfu(238_300, 6 * 540.35e9, 275e12, 6144) == pytest.approx(0.457, abs=5e-4)


def test_training_times_of_narayanan() -> None:
    """arXiv:2104.04473, section 5.1: 34 days for GPT-3, 84 for a trillion parameters."""
    assert table.training_days(175e9, 300e9, 1024, 140e12) == pytest.approx(34, abs=0.5)
    assert table.training_days(1e12, 450e9, 3072, 163e12) == pytest.approx(84, abs=1)
    assert table.gpt_parameters(12288, 96) == pytest.approx(174.6e9, rel=0.002)
    assert table.compute_optimal_tokens(67e9) == pytest.approx(1.5e12, rel=0.15)
    assert table.training_flops(175e9, 300e9) == pytest.approx(3.15e23)


@pytest.mark.parametrize(
    ("ours", "printed"),
    [
        (table.pooling_intensity(3), 2.25),
        (table.gemm_intensity(8192, 128, 8192), 124.1),
        (table.ridge_point(125e12, 900e9), 138.9),
        (network.tile_overhead(256, 257), 1.5 * 256 / 257),
        (1 - network.wave_waste(98, 108), 0.907),
        (network.wave_count(network.tile_count(1793, 1793, 256, 128), 108), 2),
    ],
)
def test_figures_of_nvidias_guides(ours: float, printed: float) -> None:
    assert ours == pytest.approx(printed, rel=0.002)


def test_a_depthwise_convolution_stays_below_half_its_kernels_area() -> None:
    by_batch = [table.convolution_intensity(each, 128, 56, 128, 3, groups=128) for each in (1, 1024)]
    assert by_batch[0] < by_batch[1] < 4.5
    assert table.convolution_intensity(64, 128, 56, 128, 3) > 100 * by_batch[1] / 2


def test_convolutions_are_products_of_the_same_work() -> None:
    works = set()
    for phase in ("forward", "dgrad", "wgrad"):
        works.add(math.prod(table.convolution_as_gemm(8, 64, 28, 128, 3, phase=phase)))
    assert works == {8 * 28 * 28 * 128 * 64 * 9}
    assert {math.prod(table.linear_as_gemm(8, 64, 10, p)) for p in ("forward", "dgrad", "wgrad")} == {5120}
    assert table.convolution_output_size(224, 7, 2, 3) == 112


def test_alignment_follows_the_guide() -> None:
    assert [network.alignment_bytes_multiple(each) for each in (4, 2, 1)] == [4, 8, 16]
    assert [network.alignment_bytes_multiple(each, 128) for each in (4, 2, 1)] == [32, 64, 128]
    assert network.aligned_sizes(1000, 64) == (960, 1024)
    assert network.aligned_sizes(3, 8) == (8, 8)


def test_a_better_size_is_found_on_both_sides() -> None:
    # 9 x 12 tiles of 256 x 128 fill one wave of 108; one column more needs a second, or smaller tiles.
    fits, over = (network.best_tiling(2304, n, 256, 108) for n in (1536, 1537))
    assert (fits.tile, fits.waves, fits.slowdown) == ((256, 128), 1, 1)
    assert over.slowdown > 1.2
    smaller, larger = network.better_sizes(2304, 1537, 256, 108)
    assert smaller == 1536
    assert larger is not None
    assert network.best_tiling(2304, larger, 256, 108).slowdown < 0.95 * over.slowdown
    assert network.better_sizes(4096, 4096, 4096, 128) == (None, None)


def test_better_sizes_are_looked_for_nearby_however_large_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = network.best_tiling

    def counted(m: int, n: int, k: int, multiprocessors: int, count: int = 1) -> network.Tiling:
        tried.append(n)
        return real(m, n, k, multiprocessors, count)

    monkeypatch.setattr(network, "best_tiling", counted)
    # As wide as the images of a large batch: fifteen per cent of it would be some hundred thousand sizes.
    assert network.better_sizes(4096, 12_845_056, 4096, 128) == (None, None)
    assert len(tried) <= 1 + 2 * 64
    assert {abs(n - 12_845_056) <= 512 for n in tried} == {True}


def test_a_long_sum_is_shared_out() -> None:
    short, long = network.best_tiling(576, 64, 64, 108), network.best_tiling(576, 64, 200_704, 108)
    assert short.splits == 1
    assert short.wave_waste > 0.8
    assert long.splits > 5
    assert long.wave_waste < 0.1


@pytest.mark.parametrize("devices", [2, 4, 8, 64])
def test_all_reduces_move_what_they_must(devices: int) -> None:
    assert scaling.ring_all_reduce_seconds(1e9, devices, 1e9) == pytest.approx(2 * (devices - 1) / devices)
    assert scaling.halving_doubling_all_reduce_seconds(1e9, devices, 1e9) == pytest.approx(2 * (devices - 1) / devices)
    assert scaling.tree_all_reduce_seconds(1e9, devices, 1e9) == pytest.approx(2)
    gathered = 2 * scaling.all_gather_seconds(1e9, devices, 1e9)
    assert gathered == pytest.approx(scaling.ring_all_reduce_seconds(1e9, devices, 1e9))
    latencies = [
        f(0, devices, 1e9, 1.0) for f in (scaling.ring_all_reduce_seconds, scaling.halving_doubling_all_reduce_seconds)
    ]
    assert latencies == [2 * (devices - 1), 2 * math.log2(devices)]
    assert table.bus_bytes_per_second(1e9, 2 * (devices - 1) / devices, devices) == pytest.approx(1e9)


def test_one_device_sends_nothing() -> None:
    for each in (
        scaling.ring_all_reduce_seconds,
        scaling.halving_doubling_all_reduce_seconds,
        scaling.tree_all_reduce_seconds,
        table.reduce_broadcast_seconds,
        scaling.all_gather_seconds,
    ):
        assert each(1e9, 1, 1e9, 1.0) == 0
    assert scaling.halving_doubling_all_reduce_seconds(1e9, 6, 1e9, 1.0) == pytest.approx(2 * 2 + 1.5 + 2 + 2)
    complete = scaling.ring_all_reduce_seconds(1e9, 8, 1e9)
    assert table.two_level_all_reduce_seconds(1e9, 8, 1, 1e9, 1e9) == pytest.approx(complete)


def test_goyals_network_and_schedule() -> None:
    assert table.all_reduce_bytes_per_second_needed(100e6, 0.125) == pytest.approx(1600e6)
    assert table.gradual_warmup(0, 100, 3.2, 0.1) == 0.1
    assert table.gradual_warmup(100, 100, 3.2, 0.1) == 3.2
    assert [round(table.step_rate(epoch, 0.1), 6) for epoch in (29, 30, 60, 80)] == [0.1, 0.01, 0.001, 0.0001]
    # Table 2a: the square root rule tried 0.5657 for 8192.
    assert table.square_root_rate(8192) == pytest.approx(0.5657, abs=5e-5)
    assert table.cosine_rate(50, 100, 1.0) == pytest.approx(0.5)
    assert table.effective_rate(0.1, 0.9) == pytest.approx(1)


def test_laws_of_speed_up() -> None:
    assert table.amdahl_speedup(20, 0.05) == pytest.approx(10.26, abs=0.005)
    assert table.gustafson_speedup(1024, 0.01) == pytest.approx(1013.77)
    assert table.efficiency(16621, 2470, 8) == pytest.approx(0.841, abs=5e-4)


def test_the_critical_batch_is_where_both_ratios_are_two() -> None:
    noise = table.critical_batch(90_000, 100)
    assert batch.steps_ratio(noise, noise) == batch.examples_ratio(noise, noise) == 2
    assert table.best_learning_rate(1.0, noise, noise) == 0.5
    assert table.adaptive_gain([5.0] * 10) == pytest.approx(1)
    sampled = table.adaptive_gain([math.sqrt(step + 0.5) for step in range(10_000)])
    assert sampled == pytest.approx(table.adaptive_gain_of_power(0.5), abs=1e-3)


def test_the_noise_scale_is_found_from_two_batches() -> None:
    square, variance = 3.0, 120.0
    at = {size: square + variance / size for size in (8, 64)}
    given = (8, at[8], 64, at[64])
    assert batch.gradient_square(*given) == pytest.approx(square)
    assert batch.gradient_variance(*given) == pytest.approx(variance)
    assert table.simple_noise_scale(variance, square) == 40


def test_mlperfs_reference_epochs_are_met_within_six_percent() -> None:
    """MLPerf training 3.1's reference convergence points of ResNet-50."""
    for size, epochs in ((1632, 35.0), (8192, 42), (32768, 56), (65536, 84.5)):
        assert table.epochs_to_target(size, 34.6, 46_900) == pytest.approx(epochs, rel=0.06)


@pytest.mark.parametrize(("epochs", "minutes", "rate"), [(88, 77.2, 24340), (40, 35.6, 23992), (16, 14.9, 22929)])
def test_ffcvs_rates_by_its_times(epochs: float, minutes: float, rate: float) -> None:
    assert table.images_per_second(epochs, minutes) == pytest.approx(rate, rel=1e-4)


def test_airbenchs_share_of_an_a100() -> None:
    assert table.sustained_flops_per_second(0.29e15, 2.59) == pytest.approx(112e12, rel=0.001)
    assert utilisation(0.29e15, 2.59, 312e12) == pytest.approx(0.359, abs=5e-4)


def test_steps_come_out_even_and_checkpoints_cost_little() -> None:
    assert batch.accumulation_steps(4096, 128, 8) == 4
    with pytest.raises(ValueError, match="3 × 128 samples do not divide 4096"):
        batch.accumulation_steps(4096, 128, 3)
    assert table.steps(50_000, 2000, 8) == 200
    assert table.steps(1_281_167, 256, 90, drop_last=False) == 90 * 5005
    interval = table.checkpoint_interval_seconds(10, 7200)
    assert interval == pytest.approx(379.5, abs=0.1)
    assert table.checkpoint_overhead(10, interval) < 0.035


def test_an_olympic_mean_needs_three_values() -> None:
    with pytest.raises(ValueError, match="at least one"):
        table.olympic_mean((1.0, 2.0))


def test_sizes_and_epochs_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="longer"):
        table.progressive_resizing_minutes(1, (1, 2), (1,), 0, 0)


def test_printed_ratios_are_compared_with_their_own_figures() -> None:
    assert table.is_superlinear(641, 36, 8)
    assert not table.is_superlinear(8 * 1.04, 1, 8)
    assert table.contradicts(2.0, 110, 36)
    assert not table.contradicts(2.0, 2.08, 1)
