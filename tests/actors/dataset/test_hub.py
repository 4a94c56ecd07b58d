"""Datasets by their names on the hub: a stand-in serves them to the real `datasets`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from actors.environments.dataset.rows import open_rows
from configs.errors import SettingsError
from configs.user_code import ROOT
from tests.actors.support.hub_server import HubServer

NAME = "someone/sums-1.5"
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: other
  data_files: other/train.jsonl
---
"""
ASKING = """
import json, sys
from actors.environments.dataset.environment import Dataset
from configs.errors import SettingsError

found = []
for settings in json.loads(sys.argv[1]):
    try:
        dataset = Dataset(prompt="q", answer="a", **settings)
        asked = sorted((each.prompt[:3], side) for each, side in dataset.all_rows())
        found.append([dataset.counts, asked])
    except SettingsError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def _lines(*numbers: int) -> str:
    return "".join(json.dumps({"q": f"{n}+1", "a": f"{n + 1}"}) + "\n" for n in numbers)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """One dataset with two subsets."""
    files = {"README.md": CARD, "main/train.jsonl": _lines(1, 2, 3), "main/test.jsonl": _lines(3)}
    server = HubServer(NAME, files | {"other/train.jsonl": _lines(4)})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_dataset_is_loaded_by_its_name_subset_and_splits(hub: HubServer, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="in the extra `data`")
    asked = [
        {"path": NAME, "subset": "main", "held_out_split": "test"},
        {"path": NAME},
        {"path": NAME, "subset": "main", "split": "dev"},
        {"path": "someone/nothing"},
    ]

    (counts, rows), *refused = _ask(asked, hub.url, tmp_path)

    assert counts == [2, 1, 1]  # trained, held out, left out: it is asked in both
    assert rows == [["1+1", False], ["2+1", False], ["3+1", True]]
    several, no_split, no_dataset = refused
    assert "pick one among the available configs: ['main', 'other']" in several
    assert several.endswith("name one of its subsets as run.environment_settings.subset")
    assert "must be one of train, test, got 'dev'" in no_split
    assert "'someone/nothing' doesn't exist on the Hub or cannot be accessed; check" in no_dataset


def test_a_hub_that_cannot_be_reached_is_one_sentence_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unreachable(ModuleType):
        DatasetDict = dict

        @staticmethod
        def load_dataset(path: str, subset: str | None) -> Any:
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub\n(LocalEntryNotFound)")

    monkeypatch.setitem(sys.modules, "datasets", Unreachable("datasets"))

    with pytest.raises(SettingsError, match="Couldn't reach") as caught:
        open_rows(NAME)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("save it with `to_parquet`, and name that file")


def test_a_file_of_an_unknown_kind_is_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)

    for path in ("data/rows.txt", "./rows.txt", "rows.txt"):
        with pytest.raises(SettingsError, match=r"must end with one of \.jsonl"):
            open_rows(path)


def _ask(settings: list[dict[str, str]], url: str, home: Path) -> Any:
    """Open datasets in a process of its own: `datasets` reads where its hub is when imported."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_DATASETS_OFFLINE": "0"}
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    answered = subprocess.run(
        [sys.executable, "-c", ASKING, json.dumps(settings)],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not answered.returncode, answered.stderr
    return json.loads(answered.stdout.splitlines()[-1])
