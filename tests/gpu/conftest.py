"""What only a card shows: `pytest -m gpu tests/gpu`, on a machine that has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from learner.model.ranks import Ranks, join

TABLE = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the table of what was measured."""
    config.stash[TABLE] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no card."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table, with the card's name."""
    if config.stash[TABLE]:
        terminalreporter.section(f"measured on {torch.cuda.get_device_name()}")
        for line in config.stash[TABLE]:
            terminalreporter.line(line)


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed at the end."""
    return request.config.stash[TABLE]


@pytest.fixture(scope="session")
def card() -> Iterator[Ranks]:
    """The only rank of a process group on the first card; a process has one such group."""
    alone = join("cuda", threads=1)
    yield alone
    if distributed.is_initialized():
        alone.destroy_process_group()
