"""Plan of several actors on one machine: their cards, names and commands."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from broker.weights.shared_memory import scratch
from configs.errors import SettingsError
from configs.machine.gpus import visible_gpus
from configs.settings import Settings
from console.run.placement import environment_of
from console.run.plan import metrics_flags
from console.run.process import Command
from console.run.run_folder import RunFolder

ALL = "all"
LONGEST_HOST = 32


def cards_of_actors(
    size: int, *, count: int | None, gpus: str | None, visible: Sequence[str]
) -> list[tuple[str, ...]]:
    """Choose the cards of each actor; none for actors on the CPU.

    Args:
        size: `actors.tensor_parallel_size`.
        count: Actors; None = one for each card, or group of `size` cards.
        gpus: `all`, or cards with commas between them; None = all that there are.
        visible: Cards that we may use.

    Raises:
        SettingsError: There are no such cards, or too few.
    """
    if gpus is None and not visible:
        return [()] * (count or 1)
    cards = list(visible) if gpus in (None, ALL) else [card.strip() for card in gpus.split(",")]
    unknown = [card for card in cards if card not in visible]
    if unknown or not cards:
        raise SettingsError(
            f"--gpus must be cards that we may use here ({', '.join(visible) or 'none'}), got "
            f"{gpus}; see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES, or leave it out for the CPU"
        )
    if len(set(cards)) < len(cards):
        raise SettingsError(f"--gpus must have each card once, got {gpus}; leave out the second")
    most = len(cards) // size
    wanted = most if count is None else count
    if not 0 < wanted <= most:
        raise SettingsError(
            f"--count must be at most {len(cards)} card(s) / actors.tensor_parallel_size {size} = "
            f"{most}, got {max(wanted, 1)}; each actor has cards of its own"
        )
    return [tuple(cards[first : first + size]) for first in range(0, wanted * size, size)]


def actor_commands(
    alone: Command, settings: Settings, *, count: int | None, gpus: str | None
) -> list[Command]:
    """Return the commands of all actors.

    Args:
        alone: That of one actor by itself.
        settings: Of the run.
        count: As in `cards_of_actors`.
        gpus: As in `cards_of_actors`.

    Raises:
        SettingsError: The cards do not suffice.
    """
    size = settings.actors.tensor_parallel_size
    placed = cards_of_actors(size, count=count, gpus=gpus, visible=visible_gpus())
    return [_command(alone, settings, number, cards) for number, cards in enumerate(placed)]


def _command(alone: Command, settings: Settings, number: int, cards: tuple[str, ...]) -> Command:
    # The log lies in a folder that machines may share; two groups of one machine have other cards.
    # In a container the run's folder may be read-only.
    host = socket.gethostname().partition(".")[0][:LONGEST_HOST]
    name = f"actor-{host}-{'gpu' + '-'.join(cards) if cards else number}"
    return replace(
        alone,
        name=name,
        arguments=(*alone.arguments, "--name", name, *metrics_flags(settings, number)),
        log=RunFolder(scratch(settings.run.folder)).log(name),
        environment=environment_of("actor", settings, gpus=cards),
    )
