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
        ({"compile": True, "activation_checkpointing": "selective"}, "must be none or full"),
    ],
)
def test_what_excludes_each_other_is_refused(learner: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings.model_validate({"run": RUN, "learner": learner})
