"""MFU: what the model needs over what the cards could do."""

from __future__ import annotations

import pytest
import torch

from learner.model.sequence_cost import SequenceCost
from learner.profiling import stated_peak, utilization

CUDA = torch.device("cuda")
SECONDS = {"wait": 9.0, "prepare": 5.0, "forward": 1.0, "backward": 2.0, "clip": 0.5}
SECONDS["optimizer"] = 0.5


def test_it_is_six_operations_per_multiply_add_of_the_tokens_that_were_run() -> None:
    """Two layers of width 4 and a vocabulary of 10; one of them attends to two tokens at most."""
    cost = SequenceCost.from_config(
        {
            "hidden_size": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 8,
            "num_hidden_layers": 2,
            "vocab_size": 10,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 2,
        }
    )
    matrices = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8)  # q, k and v, output, and the MLP
    pairs = (1 + 2 + 3) + (1 + 2 + 2) + (1 + 2) + (1 + 2)
    by_hand = 5 * matrices + 2 * 4 * pairs + 3 * 10 * 4

    found = cost.of_packed([3, 2], [3, 2], scored=3)

    assert found == by_hand
    shared = cost.of_packed([1, 2, 1], [1, 3, 2], scored=3)  # two completions of one prompt token
    assert shared == by_hand - matrices - 2 * 4 * 2, "it sees itself once, in two layers"
    peak_tflops = 6 * by_hand / 4 / 1e12  # a card that does this in the four seconds of training
    assert utilization(found, SECONDS, ranks=1, peak_tflops=peak_tflops) == pytest.approx(1)
    assert utilization(found, SECONDS, ranks=4, peak_tflops=peak_tflops) == pytest.approx(0.25)


def test_there_is_none_without_a_stated_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert stated_peak(CUDA, "bfloat16") == 989.4
    assert stated_peak(CUDA, "float32") is None
    assert stated_peak(torch.device("cpu"), "bfloat16") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Toaster")
    assert stated_peak(CUDA, "bfloat16") is None

    assert utilization(1.0, SECONDS, ranks=1, peak_tflops=None) is None
