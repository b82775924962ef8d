"""Clusters by name, and of one's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import DataError, RecipeError
from paceline.host.devices import find_device
from paceline_advisor.clusters import CLUSTERS, find_cluster

WITHIN = "within: {gigabytes_per_second: 20, latency_microseconds: 10}"
NETWORK = "network: {gigabytes_per_second: 2.5, latency_microseconds: 30}"


@pytest.mark.parametrize("name", list(CLUSTERS))
def test_every_cluster_has_a_device_that_is_known_and_a_source(name: str) -> None:
    found = CLUSTERS[name]
    assert found.source
    assert found.within.bytes_per_second > found.network.bytes_per_second / found.devices_per_node
    if found.device is not None:
        assert find_device(found.device).memory_bytes > 0


def test_datasheet_figures() -> None:
    # 4 x 100 Gbit/s are 50 GB/s, of which 0.85 is reached.
    assert find_cluster("DGX-1").network.bytes_per_second == pytest.approx(50e9 * 0.85)
    assert find_cluster("dgx_a100").devices_per_node == 8
    assert find_cluster("dgx-2").devices_per_node == 16


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'dgx-a100'"):
        find_cluster("dgx-a10")


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"gpus_per_node: 4\ndevice: l4\n{WITHIN}\n{NETWORK}\ncores_per_gpu: 6\nprice_per_gpu_hour: 0.7\n")
    found = find_cluster(str(path))
    assert (found.name, found.device, found.devices_per_node) == ("mine", "l4", 4)
    assert found.network.bytes_per_second == 2.5e9
    assert found.network.latency_seconds == pytest.approx(30e-6)
    assert (found.cores_per_device, found.price_per_device_hour) == (6, 0.7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"gpus_per_node: 4\n{WITHIN}\n", "key 'network' is missing"),
        (f"gpus_per_node: 4\n{WITHIN}\n{NETWORK}\nprice: 2\n", "key 'price' is unknown"),
        (f"gpus_per_node: 0\n{WITHIN}\n{NETWORK}\n", "gpus_per_node is 0"),
        (f"gpus_per_node: 2.5\n{WITHIN}\n{NETWORK}\n", "gpus_per_node is 2.5"),
        (f"gpus_per_node: yes\n{WITHIN}\n{NETWORK}\n", "gpus_per_node is True"),
        (
            f"gpus_per_node: 4\nwithin: 20\n{NETWORK}\n",
            "within is 20, but it has exactly the keys gigabytes_per_second and",
        ),
        (f"gpus_per_node: 4\n{WITHIN.replace('20', '-1')}\n{NETWORK}\n", "gigabytes_per_second is -1"),
        (f"gpus_per_node: 4\n{WITHIN}\n{NETWORK}\ncores_per_gpu: many\n", "cores_per_gpu is 'many'"),
        ("- 4\n", "a cluster is keys and values"),
        ("a: [1\n", "is not valid YAML"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        find_cluster(str(path))
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        find_cluster(str(tmp_path / "none.yaml"))
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(DataError, match="is a named pipe"):
        find_cluster(str(tmp_path / "pipe.yaml"))
