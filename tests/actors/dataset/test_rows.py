"""Files that rows are read from."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from actors.environments.dataset.rows import open_rows
from configs.errors import SettingsError
from configs.machine import install_command
from configs.user_code import ROOT

ROWS = [{"question": "Wie viel?", "answer": "2"}, {"question": "a, b\n", "answer": "x"}]


def test_json_lines_are_parsed_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_text(f"{lines[0]}\n\n{lines[1]}")
    rows = open_rows(str(path))

    assert len(rows) == 2
    assert [rows[1], rows[0], rows[1]] == [ROWS[1], ROWS[0], ROWS[1]]


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1"}\n\n{"question": \n')
    rows = open_rows(str(path))

    with pytest.raises(SettingsError, match=r"line 3 of .*rows.jsonl must be JSON, got: Expecting"):
        rows[1]


def test_a_list_in_json_and_tables_of_text(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.csv").write_text('\ufeffquestion,answer\nWie viel?,2\n"a, b\n",x\n')
    (tmp_path / "rows.tsv").write_text('question\tanswer\nWie viel?\t2\n"a, b\n"\tx\n')

    for name in ("rows.json", "rows.csv", "rows.tsv"):
        rows = open_rows(str(tmp_path / name))
        assert [dict(rows[i]) for i in range(len(rows))] == ROWS, name


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("rows.json", '{"a": 1}', "must be a list of objects, got dict"),
        ("rows.json", "[1]", "item 1 of .* must be an object of columns, got 1"),
        ("rows.json", "[", "a dataset must be readable, got .*: Expecting value"),
        ("rows.csv", "a,b\n1\n", "row 2 of .* must have as many fields as the first line"),
        ("rows.csv", "a,b\n1,2,3\n", "row 2 of .* must have as many fields as the first line"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, name: str, text: str, answer: str
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(SettingsError, match=answer):
        open_rows(str(tmp_path / name))


def test_what_reads_a_format_and_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")

    with pytest.raises(SettingsError, match=r"pyarrow, which is not installed.* `data`: ") as bare:
        open_rows(str(tmp_path / "rows.parquet"))
    assert str(bare.value).endswith(install_command("data"))
    with pytest.raises(SettingsError, match=r"datasets, which is not installed.* extra `data`"):
        open_rows("owner/name")


@pytest.mark.parametrize("extra", ["data", "math", "bucket", "search", "judge", "tensorboard"])
def test_an_extra_is_installed_by_a_command_that_works_in_a_checkout(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    command = shlex.split(install_command(extra))

    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    wanted = {Requirement(each) for each in project["optional-dependencies"][extra]}
    assert set(map(Requirement, command[4:])) == wanted


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("rows.jsonl", '{"q": "a"}\n{"q": "\xe9"}\n', "line 2 of .*rows.jsonl"),
        ("rows.json", '[{"q": "\xe9"}]', "rows.json"),
        ("rows.csv", "q,a\n\xe9,1\n", "rows.csv"),
        ("my rows.tsv", "q\ta\n\xe9\t1\n", "rows.tsv"),
    ],
)
def test_another_encoding_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, name: str, text: str, where: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")

    with pytest.raises(SettingsError, match=f"{where} must be in UTF-8, got byte 0xe9") as refusal:
        list(open_rows(str(path)))

    target = f"utf8-{name}"
    command = re.search("`(.*)`", str(refusal.value))
    assert command is not None
    subprocess.run(["sh", "-c", command[1]], cwd=tmp_path, check=True)
    assert "\xe9" in (tmp_path / target).read_text(encoding="utf-8")


def test_parquet_is_read_a_row_at_a_time(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="in the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    rows = open_rows(str(tmp_path / "rows.parquet"))

    assert [rows[1], rows[0]] == [ROWS[1], ROWS[0]]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(SettingsError, match="a dataset must be readable, got"):
        open_rows(str(tmp_path / "bad.parquet"))


@pytest.mark.filterwarnings("ignore")  # of what it imports
def test_a_folder_that_datasets_saved_is_read_by_its_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="in the extra `data`")
    pyarrow = pytest.importorskip("pyarrow")

    def saved(rows: list[dict[str, str]]) -> Any:  # with a fingerprint: to make one, it pickles
        table = datasets.table.InMemoryTable(pyarrow.Table.from_pylist(rows))
        return datasets.Dataset(table, fingerprint="made")

    datasets.DatasetDict({"train": saved(ROWS), "test": saved(ROWS[1:])}).save_to_disk(tmp_path)

    assert open_rows(str(tmp_path))[0] == ROWS[0]
    assert open_rows(str(tmp_path), split="test")[0] == ROWS[1]
    with pytest.raises(SettingsError, match="must be one of train, test, got 'dev'"):
        open_rows(str(tmp_path), split="dev")


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        (
            "rows.jsonl",
            '{"q": "fine", "a": "1"}\n\n{"q": "cut \\ud83d here", "a": "2"}\n',
            "line 3",
        ),
        ("rows.json", '[{"q": "fine"}, {"q": ["\\ude00"]}]', "item 2"),
    ],
)
def test_half_a_character_is_refused_by_its_place(
    tmp_path: Path, name: str, text: str, where: str
) -> None:
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(SettingsError, match=f"{where} of .* must have whole characters, got"):
        list(open_rows(str(path)))
