"""Trains on one card or two, in each layout, for `tests/gpu`. Argument: folder for results."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from configs.settings import ParallelSettings
from configs.validation.learner import layout_of
from learner.model.ranks import arrange, join
from tests.gpu.support.training_on_cards import SMALL, Load, Training, settings_of

LOAD = Load(episodes=8, prompt=32, completion=96, microbatch_tokens=512)
CASES: list[tuple[dict[str, int], list[str]]] = [
    ({}, []),
    ({}, ["parameters"]),
    ({"replicate": 2}, []),
    ({"replicate": 2}, ["parameters"]),
    ({"sequence": 2}, []),
]


def main(folder: Path) -> None:
    """Train two batches in each layout."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    ranks = join("cuda", threads=1)
    found = []
    for parallel, offload in CASES if ranks.size > 1 else CASES[:1]:
        layout = layout_of(ParallelSettings.model_validate(parallel), ranks.size)
        mesh, group, tensor = arrange(layout, "cuda", rank=ranks.rank, timeout=timedelta(minutes=1))
        here = replace(ranks, mesh=mesh, sequence=group, tensor=tensor)
        training = Training(here, SMALL, LOAD, settings_of(LOAD, {"offload": offload}))
        for number in (1, 2):
            training.step(number)
        found.append(training.parameters())
    if ranks.is_first:
        torch.save(found, folder / f"{ranks.size}.pt")
    ranks.barrier()
    ranks.destroy_process_group()
