"""Keys of the session, and the run folder of a broker process."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.transport.keys import make_keys
from configs.loader import save
from configs.settings import Settings
from console.run.redis_server import free_port
from tests.broker.support.ring import settings_with


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("run") / "keys")


@pytest.fixture
def run_settings(tmp_path: Path) -> Settings:
    """A run folder with keys and a resolved config."""
    plain = settings_with(endpoint=f"tcp://127.0.0.1:{free_port()}")
    settings = plain.model_copy(
        update={"run": plain.run.model_copy(update={"directory": tmp_path})}
    )
    make_keys(settings.run.folder / "keys")
    save(settings, settings.run.folder / "config.yaml")
    return settings
