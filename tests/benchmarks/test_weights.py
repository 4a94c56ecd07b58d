"""The arithmetic of `benchmarks/weights.py`, and one small transfer by each side."""

from benchmarks.weight_ring import WeightRing, parameters_of
from benchmarks.weight_transport import raw_broadcast
from benchmarks.weights import MIB, ratios


def figures(median):
    return {"median": median, "best": median, "worst": median}


def test_every_ratio_is_better_when_larger():
    arms = {
        "broadcast": {
            "4_mib": {
                "memory_s": figures(0.2),
                "group_s": figures(0.4),
                "raw_s": figures(0.1),
            }
        },
        "pause": {
            "torch_5_mib": {"pause_s": figures(0.001), "blocking_s": figures(0.05)},
            "vllm_5_mib": {"pause_s": figures(0.01), "blocking_s": figures(0.05)},
        },
        "sparse": {"lr_1e-06": {"fewer": 120.0}},
    }

    assert ratios(arms) == {
        "broadcast_over_raw_4_mib": 0.5,
        "group_over_raw_4_mib": 0.25,
        "pause_shorter_shadow_torch_5_mib": 50.0,
        "pause_shorter_vllm_5_mib": 5.0,
        "sparse_bytes_fewer_lr_1e-06": 120.0,
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
    assert len(raw_broadcast(MIB, receivers=1, passes=2)) == 2
