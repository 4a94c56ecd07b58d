"""vLLM's core and worker in processes of their own, as on a GPU: just as exact."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.actors.support.engine_battery import (
    aborts,
    overflow_starts_fresh,
    refuses_a_torn_file,
    swaps_under_load,
    switch_at_one_token,
)
from tests.actors.support.engine_probe import Bench, tiny_folder

pytest.importorskip("vllm", reason="not installed: only the torch engine is tested here")

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),  # three interpreters import vLLM, one after the other
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


def test_swaps_reach_a_core_in_another_process(tmp_path, monkeypatch):
    from actors.engine.vllm_engine import VllmOptions, vllm_engine

    _make_plugin_visible(tmp_path, monkeypatch)
    model = tiny_folder(tmp_path / "model", tied=True)

    async def story() -> None:
        options = VllmOptions(
            str(tmp_path / "model"), max_model_len=256, max_concurrent=64, in_process=False
        )
        engine = vllm_engine(options)
        await engine.start()
        bench = Bench(engine, model, tmp_path)
        try:
            await swaps_under_load(bench)
            await switch_at_one_token(bench)
            await overflow_starts_fresh(bench)
            await aborts(bench)
            await refuses_a_torn_file(bench)
        finally:
            await engine.close()

    asyncio.run(story())


def _make_plugin_visible(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where the project is installed, its metadata names the plugin; this stands in elsewhere.
    if entry_points(group="vllm.general_plugins", name="nyala"):
        return
    metadata = folder / "nyala-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nyala\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnyala = actors.engine.vllm_weights:register\n"
    )
    monkeypatch.syspath_prepend(str(folder))
