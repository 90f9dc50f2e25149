"""Clusters: read from YAML with clear errors, and where the axes of a device matrix lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.core.cost import local_cluster
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.cluster_file import cluster_to_yaml, read_cluster
from shardwright.core.cost.clusters import built_in_clusters, load_cluster
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.errors import ConfigError

TEXT = """
name: tiny
device:
  memory: 2 GiB
  rates: {float32: 10 TFLOP/s, bfloat16: 4e13}
  memory_bandwidth: 1 TB/s
  matrix_efficiency: 50%
levels:
  - {name: node, devices: 4, bandwidth: 100 GB/s, latency: 2 us}
  - {name: rack, devices: 16, bandwidth: 10 GB/s, latency: 0.00001}
"""


@pytest.fixture
def tiny() -> Cluster:
    return read_cluster(TEXT, "tiny.yaml")


def test_quantities_are_read_with_their_units(tiny: Cluster) -> None:
    assert tiny.device.memory == 2 * 2**30
    assert tiny.device.memory_bandwidth == 1e12
    assert tiny.levels[0].latency == pytest.approx(2e-6)
    assert [level.bandwidth for level in tiny.levels] == [1e11, 1e10]


def test_the_rate_is_the_peak_times_the_efficiency(tiny: Cluster) -> None:
    assert tiny.device.rate(torch.bfloat16) == 2e13
    assert tiny.device.rate(torch.float32) == 5e12


def test_a_dtype_that_is_not_listed_has_the_lowest_rate(tiny: Cluster) -> None:
    assert tiny.device.rate(torch.float64) == 5e12


def test_written_clusters_read_back_equal(tiny: Cluster) -> None:
    assert read_cluster(cluster_to_yaml(tiny), "again") == tiny


@pytest.mark.parametrize("name", built_in_clusters())
def test_built_in_clusters_join_eight_devices_a_node(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    # NVL72 racks join 64 devices by NVLink, and CloudMatrix384 768 dies by its bus.
    in_node = 6 if name in ("gb200", "gb300", "ascend910c") else 3
    outside = [((1, 2),)] * (6 - in_node)
    assert cluster.link_levels_of_axes(prime_mesh(64)) == (*outside, *[((0, 2),)] * in_node)


def test_a_file_may_say_how_it_differs_from_another_cluster(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: a100\ndevice: {memory: 40 GB}")
    (tmp_path / "yours.yaml").write_text(
        "base: mine.yaml\nsoftware: eager\nlevels: [{name: P, bandwidth: 25 GB/s, latency: 5 us}]"
    )
    a100, mine, yours = (
        load_cluster(name) for name in ("a100", tmp_path / "mine.yaml", tmp_path / "yours.yaml")
    )
    assert (mine.name, mine.levels, mine.device.memory) == ("mine", a100.levels, 40 * 10**9)
    assert replace(mine.device, memory=a100.device.memory) == a100.device
    assert (yours.device, yours.software, len(yours.levels)) == (mine.device, "eager", 1)
    (tmp_path / "mine.yaml").write_text("base: yours.yaml")
    with pytest.raises(ConfigError, match="base must be the name or file of another cluster"):
        load_cluster(tmp_path / "mine.yaml")


def test_a_cluster_is_found_by_path(tmp_path: Path, tiny: Cluster) -> None:
    (tmp_path / "mine.yaml").write_text(TEXT)
    assert load_cluster(tmp_path / "mine.yaml") == tiny


def test_axes_lie_on_the_links_that_they_cross(tiny: Cluster) -> None:
    assert tiny.link_levels_of_axes(prime_mesh(8)) == (((1, 2),), ((0, 2),), ((0, 2),))
    # Of four ranks two apart, two are in a node.
    assert tiny.link_levels_of_axes(Layout((4, 2), ("a", "b"))) == (((0, 2), (1, 2)), ((0, 2),))
    assert tiny.link_levels_of_axes(Layout((16,), ("a",))) == (((0, 4), (1, 4)),)
    # Three ranks in a row cross the border between nodes somewhere: 3, 4, 5.
    assert tiny.link_levels_of_axes(Layout((2, 3), ("a", "b"))) == (((1, 2),), ((1, 3),))


def test_a_run_on_nodes_of_another_size_is_refused(tiny: Cluster) -> None:
    tiny.check_node_size(4)
    replace(tiny, levels=tiny.levels[1:]).check_node_size(3)
    with pytest.raises(ConfigError, match="has 4 devices, but this run has nodes of 2\nstart 4"):
        tiny.check_node_size(2)


def test_nodes_are_those_of_which_so_many_devices_need_several(tiny: Cluster) -> None:
    assert [tiny.inner_group_sizes(devices) for devices in (4, 5, 16)] == [(), (4,), (4,)]
    rows = "  - {name: row, devices: 64, bandwidth: 5 GB/s, latency: 30 us}\n"
    assert read_cluster(TEXT + rows, "rows").inner_group_sizes(32) == (4, 16)


def test_every_stage_counts_where_it_lies(tiny: Cluster) -> None:
    pair = Layout((2,), ("a",))
    assert tiny.link_levels_of_axes(pair, (0, 2)) == (((0, 2),),)
    assert tiny.link_levels_of_axes(pair, (0, 3)) == (((1, 2),),)


def test_ranks_in_another_order_count_as_they_stand(tiny: Cluster) -> None:
    swapped = Layout((2, 4), ("a", "b"), (0, 2, 4, 6, 1, 3, 5, 7))
    assert tiny.link_levels_of_axes(swapped) == (((0, 2),), ((0, 2), (1, 2)))


def test_more_devices_than_the_cluster_has_are_an_error(tiny: Cluster) -> None:
    with pytest.raises(ConfigError, match="'tiny' has 16 devices, but 32 were requested"):
        tiny.link_levels_of_axes(prime_mesh(32))


def test_devices_that_share_a_processor_are_slower_in_proportion(tiny: Cluster) -> None:
    shared = read_cluster(TEXT.replace("  matrix", "  at_full_rate: 2\n  matrix"), "shared")
    assert shared.device.with_active_devices(2) == shared.device
    assert (
        shared.device.with_active_devices(8).rate(torch.float32)
        == tiny.device.rate(torch.float32) / 4
    )
    assert (shared.device.is_oversubscribed(2), shared.device.is_oversubscribed(3)) == (False, True)
    assert not tiny.device.is_oversubscribed(1000)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "memory: 2 GiB",
            "memory: 2 pounds",
            r"device.memory must be .*2 pounds",
        ),
        ("memory: 2 GiB", "memory: -1", "device.memory must be a positive number"),
        (
            "latency: 2 us",
            "latency: 1e308",
            r"latency must be .*, not 1e\+308\n.* to 1e\+30 with one of these units",
        ),
        ("memory: 2 GiB", "memry: 2 GiB", "unknown key device.memry\nvalid keys are memory"),
        ("  memory_bandwidth: 1 TB/s\n", "", "device.memory_bandwidth is missing"),
        ("50%", "150%", "device.matrix_efficiency must be at most 1"),
        ("float32:", "float31:", "rates.float31 is not a torch dtype"),
        ("devices: 4,", "", r"levels\[0\].devices is missing"),
        (
            "devices: 16",
            "devices: 6",
            r"levels\[1\].devices is 6, which is not a multiple of the 4",
        ),
        (
            "latency: 2 us",
            "latency: 2 us, collectives: nccl",
            "collectives 'nccl' is unknown\nuse one of trees, rings, gloo",
        ),
        ("devices: 16", "devices: many", r"levels\[1\].devices must be a positive whole number"),
        (TEXT, "[1, 2]", "the file must be a mapping"),
        (TEXT, "a: [", "expected the node content"),
    ],
)
def test_a_mistake_in_the_file_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"tiny.yaml: .*{message}"):
        read_cluster(TEXT.replace(old, new), "tiny.yaml")


def test_an_unknown_cluster_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)'h300': no built-in cluster and no file.*local, a100"
    ):
        load_cluster("h300")


def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load_cluster("local")
    assert first.name == "local"
    assert min(first.device.rates.values()) > 1e8
    monkeypatch.setattr(local_cluster, "measure_device", lambda: pytest.fail("measured again"))
    assert load_cluster("local") == first


@pytest.mark.parametrize("name", built_in_clusters())
def test_a_cluster_is_read_as_it_is_written(name: str) -> None:
    cluster = load_cluster(name)
    assert read_cluster(cluster_to_yaml(cluster), "written") == cluster


def test_efficiencies_that_a_file_does_not_name_change_nothing(tiny: Cluster) -> None:
    device = tiny.device
    assert device.rate(torch.float32, (1, 2, 3)) == device.rate(torch.float32, is_attention=True)
    assert device.rate(torch.float32) == 0.5 * device.rates["float32"]
    assert device.overlap_slowdown == 0
    assert tiny.levels[0].rate == tiny.levels[0].bandwidth


def test_small_matrices_reach_less_and_attention_what_it_reaches() -> None:
    keys = "matrix_half: 64\n  attention_efficiency: 20%\n  overlap_slowdown: 0.25\n  matrix_eff"
    device = read_cluster(TEXT.replace("matrix_eff", keys), "full").device
    large, small = device.rate(torch.float32), device.rate(torch.float32, (64, 192, 448))
    assert small == pytest.approx(large * 1 / 2 * 3 / 4 * 7 / 8)
    assert device.rate(torch.float32, is_attention=True) == pytest.approx(large * 0.2 / 0.5)
    assert device.rate(torch.float32, (512,), is_attention=True) == pytest.approx(large * 0.2 / 0.5)
    assert device.overlap_slowdown == 0.25


def test_attention_over_few_keys_reaches_less() -> None:
    halves = "attention_half: 512\n  attention_head_half: 1e9\n  "
    keys = halves + "overlaps_products: true\n  sends_routed_tokens: true\n  matrix_eff"
    device = read_cluster(TEXT.replace("matrix_eff", keys), "full").device
    long = device.rate(torch.float32, is_attention=True)
    assert device.rate(torch.float32, (1536,), is_attention=True) == pytest.approx(long * 3 / 4)
    assert device.rate(torch.float32, (1536, 64), is_attention=True) == pytest.approx(long * 3 / 8)
    assert device.rate(torch.float32, (1536, 256), is_attention=True) == pytest.approx(long * 3 / 4)
    assert device.overlaps_products
    assert device.sends_routed_tokens
    with pytest.raises(ConfigError, match=r"device.overlaps_products must be true or false, not 3"):
        read_cluster(TEXT.replace("matrix_eff", "overlaps_products: 3\n  matrix_eff"), "full")
