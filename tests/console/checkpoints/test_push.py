"""`nyala push`: a run's model on the hub, which a stand-in plays for the real client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

from configs.user_code import ROOT
from console.main import app
from learner.model.ranks import Ranks
from tests.console.support.model_hub import TOKEN, ModelHub, Repository
from tests.console.support.trained_run import trained_run

Asked: TypeAlias = list[str] | tuple[str, list[str]]
"""Words after `push` and the run, and before them a token other than the right one."""

PUSHING = """
import json, os, sys
from typer.testing import CliRunner
from console.main import app

answers = []
for token, words in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = token
    answers.append(CliRunner().invoke(app, ["push", *words]))
print(json.dumps([[answer.exit_code, answer.output] for answer in answers]))
"""
LOADING = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

def loaded(name):
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    told = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]])).logits[0, -1].tolist()
    return told, logits, GenerationConfig.from_pretrained(name).temperature

print(json.dumps([loaded(name) for name in sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_pushed_model_is_one_commit_that_transformers_loads(tmp_path: Path, ranks: Ranks) -> None:
    run = trained_run(tmp_path, ranks)
    with ModelHub().serving() as hub:
        hub.repositories["me/open"] = Repository()
        hub.repositories["them/theirs"] = Repository()
        asked: list[Asked] = [
            ["me/speller", "--private"],
            ["me/speller", "--checkpoint", "2", "--revision", "early"],
            ["me/open", "--private"],
            ["them/theirs"],
            ("hf_wrong", ["me/speller"]),
        ]
        answers = _push(run, asked, hub.url, tmp_path)
        exported = tmp_path / "exported"
        answer = CliRunner().invoke(app, ["checkpoint", "export", str(run), "--to", str(exported)])
        assert answer.exit_code == 0, answer.output
        loaded, ours = _python(LOADING, ["me/speller", str(exported)], hub.url, tmp_path)

    codes, texts = zip(*answers, strict=True)
    assert codes == (0, 0, 2, 2, 2), texts
    assert "step-000004 of r is at http" in texts[0]
    assert "me/open must be private with --private, got one that everybody sees" in texts[2]
    assert "them/theirs must be yours to write to, got 403" in texts[3]
    assert "the hub must know your token, got 401" in texts[4]
    pushed = hub.repositories["me/speller"]
    assert pushed.private
    assert pushed.commits == ["r: step-000004", "r: step-000002"]
    names = {"config.json", "generation_config.json", "chat_template.jinja", "README.md"}
    names |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(pushed.branches["main"]) == names
    assert pushed.lfs == {"model.safetensors"}
    assert "2 of 9 batches" in pushed.branches["early"]["README.md"].decode()
    assert loaded == ours
    assert loaded[0] == "user:hi\nassistant:"
    assert loaded[2] == 0.6


@pytest.mark.slow
def test_weights_of_an_earlier_upload_in_more_files_are_removed(
    tmp_path: Path, ranks: Ranks
) -> None:
    run = trained_run(tmp_path, ranks)
    left = {"model-00001-of-00002.safetensors": b"1", "model.safetensors.index.json": b"{}"}
    with ModelHub().serving() as hub:
        hub.repositories["me/speller"] = Repository(
            branches={"main": left | {"notes.md": b"mine", ".gitattributes": b""}}
        )
        ((code, text),) = _push(run, [["me/speller"]], hub.url, tmp_path)

    assert code == 0, text
    files = hub.repositories["me/speller"].branches["main"]
    assert {each for each in files if "safetensors" in each} == {"model.safetensors"}
    assert {"notes.md", ".gitattributes"} <= set(files)
    assert len(hub.repositories["me/speller"].commits) == 1


@pytest.mark.slow
def test_a_dry_run_says_what_would_be_done_and_changes_nothing(
    tmp_path: Path, ranks: Ranks
) -> None:
    run = trained_run(tmp_path, ranks)
    left = {"model-00001-of-00002.safetensors": b"1", "notes.md": b"mine"}
    with ModelHub().serving() as hub:
        hub.repositories["me/open"] = Repository(branches={"main": dict(left)})
        asked = [["me/new", "--private"], ["me/open"], ["me/open", "--private"], ["them/theirs"]]
        dry = [(TOKEN, [*words, "--dry-run"]) for words in asked]
        answers = _push(run, [*dry, ("hf_wrong", ["me/new", "--dry-run"])], hub.url, tmp_path)

    codes, texts = zip(*answers, strict=True)
    assert codes == (0, 0, 2, 2, 2), texts
    assert "of r would go to me/new, branch main; it is made as a private model, as me" in texts[0]
    assert "MiB  model.safetensors" in texts[0]
    assert "in 7 files" in texts[0]
    assert "removed  model-00001-of-00002.safetensors" in texts[1]
    assert "notes.md" not in texts[1]
    assert "me/open must be private with --private" in texts[2]
    assert "them/theirs must be yours to write to, got 403" in texts[3]
    assert "the hub must know your token, got 401" in texts[4]
    assert {*hub.repositories} == {"me/open"}
    assert hub.repositories["me/open"].branches == {"main": left}


@pytest.fixture(scope="module")
def unreached(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> dict[str, tuple[int, str]]:
    """What is answered where no hub is reached, each in its own way, and by what is no dry run."""
    folder = tmp_path_factory.mktemp("unreached")
    run = trained_run(folder, ranks)
    with ModelHub().serving() as hub:
        url = hub.url
    hub.server_close()
    dry, real = ["me/new", "--dry-run"], ["me/speller"]
    no_token, out_of_reach, refused = _push(run, [("", dry), (TOKEN, dry), real], url, folder)
    (offline,) = _push(run, [dry], url, folder, HF_HUB_OFFLINE="1")
    return {
        "no token": no_token,
        "offline": offline,
        "out of reach": out_of_reach,
        "no dry run": refused,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("no token", "(no token: set HF_TOKEN to one, or run `hf auth login`)"),
        ("offline", "HF_HUB_OFFLINE"),
        ("out of reach", "Connection refused"),
    ],
    ids=["no token", "offline", "out of reach"],
)
def test_a_dry_run_without_the_hub_shows_files_and_card_and_says_so(
    unreached: dict[str, tuple[int, str]], case: str, why: str
) -> None:
    code, text = unreached[case]

    assert code == 0, text
    first, *lines = text.splitlines()
    assert "of r would go to me/new, branch main; nothing was looked at on the hub (" in first
    assert why in first
    assert first.endswith("; nothing was uploaded")
    assert any("MiB  model.safetensors" in line for line in lines)
    assert "README.md:" in lines
    assert "2 of 9 batches" in text or "4 of 9 batches" in text


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_sentence(
    unreached: dict[str, tuple[int, str]],
) -> None:
    code, text = unreached["no dry run"]

    assert code == 2
    assert re.search(r"http://\S+ must take the files of me/speller, got: ", text)
    assert text.count("\n") == 1


def test_what_cannot_be_pushed_is_refused_before_the_hub_is_asked(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained_run(tmp_path, ranks)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)

    assert "with write access must be set, got none; set HF_TOKEN" in _refused(run, "me/speller")
    assert "must be OWNER/NAME, got 'speller'" in _refused(run, "speller")
    assert "got a path that does not exist" in _refused(tmp_path / "no", "me/speller")
    assert "must hold step-000009, got" in _refused(run, "me/speller", "--checkpoint", "9")
    for checkpoint in (run / "checkpoints").iterdir():
        checkpoint.rename(run / checkpoint.name)
    assert "must have trained a model to upload, got a run without" in _refused(run, "me/speller")


def _refused(*arguments: object) -> str:
    answer = CliRunner().invoke(app, ["push", *map(str, arguments)])
    assert answer.exit_code == 2, answer.output
    return " ".join(answer.output.replace("│", " ").split())


def _push(
    run: Path, asked: Sequence[Asked], url: str, home: Path, **more: str
) -> list[tuple[int, str]]:
    """Ask one after another in one process, with a token of their own where one is named."""
    tokens = [each if isinstance(each, tuple) else (TOKEN, each) for each in asked]
    words = [(token, [str(run), *each]) for token, each in tokens]
    answers = _python(PUSHING, [json.dumps(words)], url, home, **more)
    return [(code, text) for code, text in answers]


def _python(program: str, arguments: list[str], url: str, home: Path, **more: str) -> Any:
    """Run in a process of its own: the client reads where its hub is when imported."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | more
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    answered = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not answered.returncode, answered.stderr
    return json.loads(answered.stdout.splitlines()[-1])
