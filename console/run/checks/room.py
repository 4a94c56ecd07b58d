"""Check memory and disk against the model: shared memory, cards, checkpoints.

Sizes are computed from `config.json`, as in `card_memory.py`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from broker.weights.shared_memory import HEADROOM, SCRATCH, SHARED_MEMORY, scratch
from configs.errors import SettingsError
from configs.settings import Settings
from console.run.card_memory import CardMemory, card_memory, smallest_card
from console.run.model_shape import ModelShape
from learner.weights.slots import NUM_SLOTS

from .check import GIB, Doubt, sized
from .model import model_config

SMALL_BYTES = 64 * 2**20
"""A generous size for the character model that `init` makes."""
SPARE_DISK_BYTES = GIB
"""For logs, samples and metrics."""
WEIGHT_BYTES, MOMENT_BYTES = 4, 8
"""Of a parameter in a checkpoint; moments are those of trained ones."""


class Sizes(NamedTuple):
    """Bytes of a model."""

    published: int
    """As actors load it."""
    checkpoint: int


def sizes_of(settings: Settings) -> Sizes:
    """Compute the sizes of a run's model.

    Raises:
        SettingsError: There is no such model, or its configuration names no sizes.
    """
    config = model_config(settings.run)
    if config is None:
        return Sizes(SMALL_BYTES, SMALL_BYTES)
    try:
        parameters = ModelShape.of(config).parameters
    except KeyError as error:
        raise SettingsError(
            f"run.model must have its sizes in config.json, got none of {error}; the room that it "
            f"takes is not known"
        ) from None
    itemsize = 2 if settings.run.dtype == "bfloat16" else 4
    state = WEIGHT_BYTES + (0 if settings.learner.lora_rank else MOMENT_BYTES)
    return Sizes(itemsize * parameters, state * parameters)


def check_size(settings: Settings) -> str:
    """The size of the model is known; all other room follows from it.

    Raises:
        SettingsError: It is not.
    """
    if settings.run.model == "init":
        return f"a character model, at most {sized(SMALL_BYTES)}"
    return f"{sized(sizes_of(settings).published)} as it is published"


def check_shared_memory(settings: Settings) -> str | Doubt:
    """The slots of published weights fit into shared memory, or else onto the disk.

    Raises:
        SettingsError: They fit nowhere.
    """
    wanted = int(NUM_SLOTS * sizes_of(settings).published * HEADROOM)
    free = _free(SHARED_MEMORY)
    figures = f"{NUM_SLOTS} copies of the weights take {sized(wanted)}, {sized(free)} free"
    if wanted < free:
        return f"{figures} in {SHARED_MEMORY}"
    place = scratch(settings.run.folder)
    remedy = "enlarge it (docker: --shm-size, or --ipc=host; else `mount -o remount,size=...`)"
    if wanted > _free(place):
        raise SettingsError(
            f"{SHARED_MEMORY} must have {sized(wanted)} free for {NUM_SLOTS} copies of the "
            f"weights, got {sized(free)}, and {sized(_free(place))} on the disk of {place}; "
            f"{remedy}, or name a larger disk in {SCRATCH}"
        )
    return Doubt(
        f"{SHARED_MEMORY} should have {sized(wanted)} free for {NUM_SLOTS} copies of the weights, "
        f"got {sized(free)}: they go to the disk of {place}, which is slower; {remedy}"
    )


def check_disk(settings: Settings) -> str:
    """The checkpoints of a run fit onto its disk, beside its logs and its last model.

    Raises:
        SettingsError: They do not.
    """
    sizes, kept = sizes_of(settings), settings.learner.keep_checkpoints
    count = kept + 1 + settings.learner.keep_best  # one more while it is being written
    wanted = count * sizes.checkpoint + sizes.published + SPARE_DISK_BYTES
    held = sum(
        path.stat().st_size
        for path in (settings.run.folder / "checkpoints").rglob("*")
        if path.is_file()
    )
    free = _free(settings.run.folder)
    if wanted > free + held:
        raise SettingsError(
            f"the disk of run.directory must have {sized(wanted - held)} free for {count} "
            f"checkpoints of {sized(sizes.checkpoint)} and the model, got {sized(free)} at "
            f"{settings.run.folder}; free some space, lower learner.keep_checkpoints, or choose "
            f"another disk with --set run.directory=FOLDER"
        )
    figures = f"{count} checkpoints of {sized(sizes.checkpoint)}, {sized(free)} free"
    return f"{figures}, {sized(held)} of them written" if held else figures


def learner_memory(settings: Settings, card_bytes: int | None) -> tuple[CardMemory, bool] | str:
    """Compute what the learner takes on each card, and whether it trains on one.

    Args:
        settings: Of the run.
        card_bytes: Of a card; None = there is none.

    Returns:
        Why it is not computed, as text, where it is not.
    """
    config = model_config(settings.run)
    if config is None:
        return "a character model"
    device = settings.learner.device
    on_gpu = device == "cuda" or (device == "auto" and card_bytes is not None)
    try:
        return card_memory(settings, config, on_gpu=on_gpu, card_bytes=card_bytes), on_gpu
    except KeyError as error:
        return f"not computed, config.json has no {error}"


def check_learner_memory(settings: Settings) -> str | Doubt:
    """The learner fits the smallest card of this machine, or its memory.

    Raises:
        SettingsError: It fits no card.
    """
    card = smallest_card()
    found = learner_memory(settings, card)
    if isinstance(found, str):
        return found
    memory, on_gpu = found
    if on_gpu and card is not None:
        memory.check(card)
        return f"{sized(memory.total)} of {sized(card)} on each card, computed"
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = memory.total * memory.ranks
    if wanted > here:
        return Doubt(
            f"the learner should fit this machine's memory of {sized(here)}, got {sized(wanted)} "
            f"(computed) for {memory.ranks} rank(s) on the CPU; choose a smaller model, or a "
            f"machine with a GPU"
        )
    return f"{sized(wanted)} of this machine's {sized(here)}, computed"


def _free(place: Path) -> int:
    """Free bytes of the disk that a folder lies on, or will."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
