"""The step of several devices, cause by cause."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from paceline.recipe.running import Parallel
from paceline_advisor.clusters import Link
from paceline_advisor.formulas.parallel_step import (
    BUCKET_CAP_MB,
    CALIBRATION,
    HOST_SECONDS,
    LAUNCH_SECONDS,
    UNKNOWN_CORES,
    Calibration,
    Gradient,
    Host,
    Launches,
    Network,
    OneDevice,
    ParallelConfig,
    Unit,
    predict,
    slowest_of,
)
from paceline_advisor.formulas.scaling import Fabric

TENSORS = 100
NETWORK = Network(
    gradients=tuple(Gradient(1e6, (index + 1) / TENSORS) for index in range(TENSORS)),
    units=tuple(Unit(1e7, 1e7, 0.1) for _ in range(10)),
)
ONE = OneDevice(seconds=0.1, samples=64, spread=0)
FABRIC = Fabric(
    devices=8,
    per_node=8,
    within=Link(1e15, 0),
    network=Link(1e15, 0),
)

HOST = Host()
WAY = ParallelConfig(strategy="ddp", micro_batch=64)
# Without the fitted costs, each cause is seen alone.
predicted = partial(predict, calibration=Calibration(bytes_per_second=1e15, sharing=0, host=1, update_bytes=0))


def test_with_a_perfect_link_and_host_scaling_is_linear() -> None:
    found = predicted(NETWORK, ONE, FABRIC, HOST, WAY)
    assert found.seconds == pytest.approx(0.1, rel=1e-4)
    assert found.rate == pytest.approx(8 * 640, rel=1e-4)
    assert found.efficiency == pytest.approx(1, rel=1e-4)
    assert found.limit == "computing"


def test_one_device_waits_for_nobody() -> None:
    host = Host(waits=2, seconds_per_sample=1.0, cores_per_device=1)
    found = predicted(NETWORK, replace(ONE, spread=0.5), replace(FABRIC, devices=1), host, WAY)
    assert found.seconds == found.low_seconds == found.high_seconds == pytest.approx(0.1)


def test_the_parts_sum_up_to_the_step() -> None:
    slow = replace(FABRIC, within=Link(1e9, 1e-5))
    host = Host(waits=1, seconds_per_sample=2e-3, cores_per_device=1)
    found = predicted(NETWORK, replace(ONE, spread=0.02), slow, host, WAY)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.low_seconds < found.seconds < found.high_seconds


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_slow_link_is_named(strategy: str) -> None:
    slow = replace(FABRIC, within=Link(5e8, 0))
    found = predicted(NETWORK, ONE, slow, HOST, replace(WAY, strategy=strategy))
    assert found.limit == "communication"
    assert found.efficiency < 0.5


def test_the_host_costs_for_each_tensor_and_wait() -> None:
    found = predicted(NETWORK, ONE, FABRIC, Host(waits=2), WAY)
    assert found.parts["host"] == pytest.approx(2 * TENSORS * HOST_SECONDS)
    assert found.limit == "host"


def test_the_slowest_device_is_waited_for() -> None:
    found = predicted(NETWORK, replace(ONE, spread=0.05), FABRIC, HOST, WAY)
    # The expected maximum of eight standard normals is 1.4236 (Harter 1961).
    assert slowest_of(8) == pytest.approx(1.4236, abs=0.02)
    assert slowest_of(1) == 0
    assert found.parts["waiting"] == pytest.approx(0.1 * 0.05 * slowest_of(8))
    assert found.limit == "waiting"


def test_the_slowest_of_many_by_simulation() -> None:
    import numpy as np

    drawn = np.random.default_rng(0).standard_normal((20_000, 256)).max(axis=1).mean()
    assert slowest_of(256) == pytest.approx(drawn, rel=0.02)


def test_data_come_no_faster_than_the_cores_give_them() -> None:
    host = Host(seconds_per_sample=10e-3, cores_per_device=4)
    found = predicted(NETWORK, ONE, FABRIC, host, WAY)
    assert found.rate == pytest.approx(8 * 400)
    assert found.limit == "data"
    fewer = predicted(NETWORK, ONE, FABRIC, replace(host, loaders_per_device=2), WAY)
    assert fewer.rate == pytest.approx(8 * 200)


def test_every_node_has_loaders_of_its_own() -> None:
    host = Host(seconds_per_sample=10e-3, cores_per_device=4)
    assert predicted(NETWORK, ONE, replace(FABRIC, devices=16), host, WAY).rate == pytest.approx(16 * 400)


def test_a_small_share_ends_at_what_the_host_can_launch() -> None:
    found = predicted(NETWORK, ONE, FABRIC, HOST, replace(WAY, micro_batch=1))
    assert found.seconds == pytest.approx(TENSORS * LAUNCH_SECONDS, rel=1e-3)
    assert found.limit == "launching"


def test_a_compiled_step_launches_less() -> None:
    launches = Launches(eager=1000, products=100)
    assert [launches.share(each) for each in ("no", "fused", "graphs")] == [1, 0.2, 0.002]
    assert Launches().share("graphs") == 1
    # More would be left of a network of products alone than it launches.
    assert Launches(eager=150, products=100).share("fused") == 1
    way = replace(WAY, micro_batch=1)
    eager, fused = (predicted(NETWORK, ONE, FABRIC, HOST, replace(way, launched=each)) for each in (1.0, 0.2))
    assert fused.seconds == pytest.approx(0.2 * eager.seconds, rel=1e-3)
    computing = predicted(NETWORK, ONE, FABRIC, HOST, replace(way, launched=0.002))
    assert (computing.limit, computing.seconds) == ("computing", pytest.approx(0.1 / 64, rel=1e-3))


def test_processes_without_accelerators_share_the_cores() -> None:
    host = Host(shares_cores=True, cores_per_device=0.25, threads=1)
    found = predicted(NETWORK, ONE, FABRIC, host, WAY)
    # Eight threads on two cores: each is at work a quarter of the time.
    assert found.seconds == pytest.approx(0.4, rel=1e-3)
    assert found.limit == "cores"


def test_ddp_communicates_once_a_step_and_fsdp_in_every_pass() -> None:
    slow = replace(FABRIC, within=Link(5e9, 0))
    once = {s: predicted(NETWORK, ONE, slow, HOST, replace(WAY, strategy=s)) for s in ("ddp", "fsdp")}
    four = {s: predicted(NETWORK, ONE, slow, HOST, replace(WAY, strategy=s, passes=4)) for s in ("ddp", "fsdp")}
    assert four["ddp"].parts["communication"] == pytest.approx(once["ddp"].parts["communication"])
    assert four["fsdp"].parts["communication"] == pytest.approx(4 * once["fsdp"].parts["communication"])
    assert four["ddp"].efficiency > once["ddp"].efficiency


def test_a_doubted_figure_widens_the_range() -> None:
    sure = predicted(NETWORK, ONE, FABRIC, HOST, WAY)
    unsure = predicted(NETWORK, replace(ONE, uncertainty=0.1), FABRIC, HOST, WAY)
    assert unsure.seconds == sure.seconds
    assert unsure.high_seconds == pytest.approx(1.1 * sure.high_seconds, rel=1e-3)
    assert unsure.low_seconds == pytest.approx(sure.low_seconds / 1.1, rel=1e-3)


def test_the_fitted_costs_of_several_devices() -> None:
    way = replace(WAY, parameters=1e8, memory_bytes_per_second=1e12)
    found = predict(NETWORK, replace(ONE, passes=4), FABRIC, Host(waits=1, cores_per_device=4), replace(way, passes=1))
    assert found.parts["sharing"] == pytest.approx(0.1 * CALIBRATION.sharing / 4)
    assert found.parts["host"] == pytest.approx(TENSORS * HOST_SECONDS * CALIBRATION.host)
    # Of the four passes' update, a quarter is in the measured pass.
    assert found.parts["update"] == pytest.approx(0.75 * 1e8 * CALIBRATION.update_bytes / 1e12)
    assert predict(NETWORK, ONE, FABRIC, HOST, replace(way, passes=4)).parts["update"] == 0
    # On an endless link, gradients still cross the device's memory.
    assert found.parts["communication"] > predicted(NETWORK, ONE, FABRIC, HOST, WAY).parts["communication"] > 0


def test_devices_share_the_cores_of_their_own_node() -> None:
    host, per_node = Host(cores_per_device=5), 8
    assert [host.devices_per_core(devices, per_node) for devices in (2, 8, 64)] == [2 / 40, 8 / 40, 8 / 40]
    assert Host().devices_per_core(8, per_node) == pytest.approx(1 / UNKNOWN_CORES)


def test_cores_have_none_of_the_costs_of_gpus() -> None:
    parts = predict(NETWORK, ONE, FABRIC, Host(shares_cores=True), WAY).parts
    assert parts["sharing"] == parts["update"] == 0


def test_the_range_grows_with_the_part_that_is_predicted() -> None:
    slow = replace(FABRIC, within=Link(1e9, 0))
    fast, much = (predict(NETWORK, ONE, each, HOST, WAY) for each in (FABRIC, slow))
    widths = [each.high_seconds / each.low_seconds for each in (fast, much)]
    assert widths[0] < 1.5 < widths[1]
    # Published rates are far more often below a prediction than above it.
    assert all(each.high_seconds / each.seconds > each.seconds / each.low_seconds for each in (fast, much))


def test_a_measured_rate_of_several_scales_their_costs() -> None:
    slow = replace(FABRIC, within=Link(5e9, 0))
    found = predict(NETWORK, ONE, slow, HOST, WAY)
    factor = found.factor_for(0.8 * found.rate)
    assert factor > 1
    assert predict(NETWORK, ONE, slow, HOST, WAY, factor=factor).rate == pytest.approx(0.8 * found.rate)
    assert found.factor_for(100 * found.rate) == 0


def test_buckets_are_as_large_as_a_recipe_has_them() -> None:
    """Formulas know no recipes, and the section of a recipe is to be read by itself: the number is in both."""
    assert Parallel().bucket_cap_mb == BUCKET_CAP_MB
