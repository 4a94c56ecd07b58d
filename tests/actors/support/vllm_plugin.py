"""The entry point of our vLLM plugin, for processes that vLLM starts."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest


def make_plugin_visible(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's processes find our plugin where the project is not installed."""
    # Where the project is installed, its metadata names the plugin; this stands in elsewhere.
    if entry_points(group="vllm.general_plugins", name="nyala"):
        return
    metadata = folder / "nyala-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nyala\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnyala = actors.engine.weights.loading:register\n"
    )
    monkeypatch.syspath_prepend(str(folder))
