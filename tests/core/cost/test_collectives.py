"""Seconds of collectives: the α-β formulas, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.cost.cluster import GLOO, RINGS, Cluster, Device, LinkLevel
from shardwright.core.cost.collectives import Links
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh

NODE = LinkLevel("node", bandwidth=100.0, latency=1.0, devices=4)
NETWORK = LinkLevel("network", bandwidth=10.0, latency=3.0)
CLUSTER = Cluster("toy", Device(1, {"float32": 1.0}, 1.0), (NODE, NETWORK))


@pytest.fixture
def links() -> Links:
    """2 nodes of 2 · 2 devices."""
    return Links(CLUSTER, prime_mesh(8))


def test_an_all_gather_sends_all_but_its_own_part(links: Links) -> None:
    assert links.seconds("all_gather", (1, 2), 800) == pytest.approx(2 * 1 + 3 / 4 * 800 / 100)
    assert links.seconds("reduce_scatter", (0,), 800) == pytest.approx(3 + 1 / 2 * 800 / 10)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(links: Links) -> None:
    for axes in [(0,), (2,), (0, 2), (0, 1, 2)]:
        halves = [links.seconds(kind, axes, 800) for kind in ("reduce_scatter", "all_gather")]
        assert links.seconds("all_reduce", axes, 800) == pytest.approx(sum(halves))


def test_between_nodes_only_the_shards_of_a_node_are_sent(links: Links) -> None:
    within = 2 * (2 * 1 + 3 / 4 * 800 / 100)
    between = 2 * (3 + 1 / 2 * (800 / 4) / 10)
    assert links.seconds("all_reduce", (0, 1, 2), 800) == pytest.approx(within + between)


def test_an_all_to_all_sends_each_part_over_the_link_that_it_needs(links: Links) -> None:
    within = 2 * 1 + 3 / 8 * 800 / 100
    between = 3 + 4 / 8 * 800 / 10
    assert links.seconds("all_to_all", (0, 1, 2), 800) == pytest.approx(within + between)


def test_a_permute_takes_the_slowest_link(links: Links) -> None:
    assert links.seconds("permute", (0, 2), 800) == pytest.approx(3 + 80)
    assert links.seconds("permute", (1, 2), 800) == pytest.approx(1 + 8)


def test_an_all_to_all_of_unequal_parts_takes_as_long_as_a_permute(links: Links) -> None:
    for axes in ((0, 2), (1, 2)):
        assert links.seconds("all_to_all_v", axes, 800) == links.seconds("permute", axes, 800)


def test_a_group_of_one_device_takes_no_time() -> None:
    links = Links(CLUSTER, Layout((1, 2), ("a", "b")))
    assert links.seconds("all_reduce", (0,), 800) == 0
    assert links.seconds("all_reduce", (), 800) == 0


def test_stages_that_do_not_fill_a_node_cross_nodes() -> None:
    assert Links(CLUSTER, prime_mesh(2), stages=2).levels == (((0, 2),),)
    assert Links(CLUSTER, prime_mesh(3), stages=2).levels == (((1, 3),),)


def test_gloo_hands_messages_round_a_ring_and_reduces_all_to_scatter() -> None:
    ring = LinkLevel("processes", bandwidth=100.0, latency=1.0, collectives=GLOO)
    links = Links(Cluster("toy", CLUSTER.device, (ring,)), prime_mesh(8))
    assert links.seconds("all_gather", (0, 1, 2), 800) == pytest.approx(7 * 1 + 7 / 8 * 800 / 100)
    all_reduce = links.seconds("all_reduce", (0, 1, 2), 800)
    assert all_reduce == pytest.approx(2 * (7 * 1 + 7 / 8 * 800 / 100))
    assert links.seconds("reduce_scatter", (0, 1, 2), 800) == all_reduce
    assert links.seconds("all_gather", (0,), 800) == pytest.approx(1 + 1 / 2 * 800 / 100)


def test_a_gather_goes_around_one_ring_of_all_devices_and_an_all_reduce_along_trees() -> None:
    levels = tuple(replace(level, collectives=RINGS) for level in (NODE, NETWORK))
    links = Links(replace(CLUSTER, levels=levels), prime_mesh(16))
    # 16 devices in 4 nodes: 12 of the messages stay in a node.
    assert links.seconds("all_gather", range(4), 0) == 12 * 1 + 3 * 3
    assert links.seconds("reduce_scatter", (2, 3), 0) == 3 * 1
    assert links.seconds("all_reduce", range(4), 0) == 2 * (2 * 1 + 2 * 3)


def test_a_collective_sends_at_the_share_of_the_bandwidth_that_a_link_reaches() -> None:
    half = replace(CLUSTER, levels=(replace(NODE, efficiency=0.5), NETWORK))
    for kind in ("all_gather", "all_to_all", "permute"):
        whole, slow = (Links(c, prime_mesh(4)).seconds(kind, (1,), 800) for c in (CLUSTER, half))
        assert slow - 1 == pytest.approx(2 * (whole - 1))


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "permute"])
def test_each_collective_takes_the_time_of_a_call_beside_its_messages(kind: str) -> None:
    called = replace(CLUSTER, levels=tuple(replace(level, call=5.0) for level in CLUSTER.levels))
    once, with_call = (Links(c, prime_mesh(4)).seconds(kind, (1,), 800) for c in (CLUSTER, called))
    assert with_call == once + 5


def test_processes_that_share_a_processor_send_no_empty_parts_round_a_ring() -> None:
    device = replace(CLUSTER.device, at_full_rate=1)
    level = LinkLevel("processes", 1e30, 1.0, collectives=GLOO)
    shared = Links(Cluster("shared", device, (level,)), Layout((8,), ("all",)))
    # 7 messages there and back, each after the turns of all 8.
    many = shared.seconds("all_reduce", (0,), 4096)
    assert many == pytest.approx(8 * 14)
    assert shared.seconds("all_reduce", (0,), 4) == pytest.approx(many / 8)
    assert shared.seconds("all_reduce", (0,), 4, bucketed=True) == pytest.approx(many)
    assert shared.seconds("all_gather", (0,), 4) == pytest.approx(many / 2)
    apart = Links(Cluster("apart", CLUSTER.device, (level,)), Layout((8,), ("all",)))
    assert apart.seconds("all_reduce", (0,), 4) == pytest.approx(14)
