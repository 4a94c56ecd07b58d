"""The arithmetic of `python -m benchmarks.weights`, and one small transfer by each side."""

import pytest

from benchmarks.weights.__main__ import MIB, ratios
from benchmarks.weights.ring import WeightRing, parameters_of
from benchmarks.weights.transport import raw_broadcast
from lab.faults.network import SecondNetwork
from tests.needs import skip_without

pytestmark = pytest.mark.slow

LINK_S = 0.5
BEYOND_BURST = 0.7
"""A quarter of 8 MiB passes at once."""


def figures(median):
    return {"median": median, "best": median, "worst": median}


def test_every_ratio_is_better_when_larger():
    arms = {
        "broadcast": {
            "4_mib": {
                "memory_s": figures(0.2),
                "raw_beside_memory_s": figures(0.1),
                "group_s": figures(0.4),
                "raw_beside_group_s": figures(0.1),
                "link_group_s": figures(0.4),
                "raw_beside_link_group_s": figures(0.3),
            },
            "100_mib": {"memory_s": figures(2.0), "raw_beside_memory_s": figures(2.0)},
        },
        "pause": {
            "torch_5_mib": {"pause_s": figures(0.001), "blocking_s": figures(0.05)},
            "vllm_5_mib": {"pause_s": figures(0.01), "blocking_s": figures(0.05)},
        },
        "held": {
            "5_mib": {
                "copied": {"copies_held": 9.0, "served_s": 0.2},
                "in_place": {"copies_held": 3.0, "served_s": 0.1},
            }
        },
        "fill": {"loader_over_plan": 2.5},
        "sparse": {"lr_1e-06": {"fewer": 120.0, "group_fewer": 90.0}},
    }

    assert ratios(arms) == {
        "broadcast_over_raw_4_mib": 0.5,
        "group_over_raw_4_mib": 0.25,
        "link_group_over_raw_4_mib": 0.75,
        "broadcast_over_raw_100_mib": 1.0,
        "pause_shorter_shadow_torch_5_mib": 50.0,
        "pause_shorter_vllm_5_mib": 5.0,
        "sparse_bytes_fewer_lr_1e-06": 120.0,
        "group_bytes_fewer_lr_1e-06": 90.0,
        "copies_fewer_5_mib": 3.0,
        "served_sooner_5_mib": 2.0,
        "loader_over_plan": 2.5,
    }
    assert ratios({"fan_out": {}}) == {}


def test_both_sides_of_a_broadcast_move_all_bytes(tmp_path):
    ring = WeightRing(tmp_path, parameters_of(MIB))
    try:
        ours = ring.deliver()
    finally:
        ring.close()

    assert ours.epoch > 0, "by a group, not by pull"
    assert 0 < ours.wall_s < 30
    assert len(raw_broadcast(MIB, passes=2)) == 2


def test_neither_side_is_faster_than_the_link_between_two_networks(tmp_path):
    skip_without("a second network with a limit")
    with SecondNetwork() as network:
        network.limit(int(8 * MIB * 8 / LINK_S))  # 8 MiB take so many seconds
        endpoint = f"tcp://{network.here}:0"
        model = parameters_of(8 * MIB)
        ring = WeightRing(
            tmp_path,
            model,
            network=network.name,
            publisher_endpoint=endpoint,
            pull_from=("publisher",),
        )
        try:
            ours = ring.deliver()
        finally:
            ring.close()
        raw_s = min(raw_broadcast(8 * MIB, passes=2, network=network))

    assert ours.epoch > 0, "by a group, not by pull"
    assert min(ours.wall_s, raw_s) > LINK_S * BEYOND_BURST
