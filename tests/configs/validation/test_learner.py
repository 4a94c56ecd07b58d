"""Settings of the learner that exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from configs.settings import Settings

RUN = {"model": "init", "environment": "calculator"}


@pytest.mark.parametrize(
    ("learner", "text"),
    [
        ({"optimizer": "muon", "offload": ["parameters"]}, "with learner.optimizer = muon"),
        ({"offload": ["activations"], "activation_checkpointing": "none"}, "must be full where"),
        ({"broadcast_ports": [5770, 5760]}, "a higher last one, got 5770 and 5760"),
        ({"broadcast_ports": [5760, 5760]}, "another port than the one before"),
        (
            {"broadcast_ports": [5750, 5760], "publisher_endpoint": "tcp://127.0.0.1:5758"},
            "got 5750 to 5760 with 5758",
        ),
        ({"broadcast_ports": [5760, 5770], "broadcast": False}, "must be null with"),
        ({"broadcast_ports": [0, 5770]}, "broadcast_ports.0"),
        ({"broadcast": True, "advertise": "hub"}, "got true with hub; groups connect"),
        ({"advertise": "tcp://hub:5758"}, "learner.advertise"),
        ({"advertise": "hub:"}, "learner.advertise"),
        ({"compile": True, "activation_checkpointing": "selective"}, "must be none or full"),
        ({"lora_alpha": 8.0}, r"learner.lora_alpha must be null without learner.lora_rank, got 8"),
        (
            {"base_dtype": "nf4"},
            r"learner.base_dtype must be null without learner.lora_rank, got nf",
        ),
        (
            {"lora_rank": 8, "base_dtype": "nf4", "compile": True},
            r"base_dtype must be bfloat16 or n",
        ),
        ({"lora_rank": 8, "optimizer": "adamw8bit"}, "must be adamw with learner.lora_rank, got a"),
        ({"lora_rank": 8, "sparse_weights": True}, "learner.sparse_weights must be false with"),
    ],
)
def test_what_excludes_each_other_is_refused(learner: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings.model_validate({"run": RUN, "learner": learner})


@pytest.mark.parametrize(
    ("learner", "text"),
    [
        ({"compile": True}, r"learner\.compile must be false with parallel\.tensor > 1, .* with 2"),
        ({"optimizer": "muon"}, r"learner\.optimizer must be adamw with parallel\.tensor .*got mu"),
        ({"optimizer": "adamw8bit"}, r"with parallel\.tensor > 1, got adamw8bit with 2; it needs"),
        ({"lora_rank": 8}, r"learner\.lora_rank must be 0 with parallel\.tensor > 1, got 8 with 2"),
    ],
)
def test_what_divided_matrices_exclude_is_refused(learner: dict[str, Any], text: str) -> None:
    tree = {"run": RUN, "learner": {"ranks": 2} | learner, "parallel": {"tensor": 2}}

    with pytest.raises(ValueError, match=text):
        Settings.model_validate(tree)
