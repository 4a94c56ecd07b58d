from __future__ import annotations

from pathlib import Path

import pytest

from broker.transport.keys import make_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("run") / "keys")
