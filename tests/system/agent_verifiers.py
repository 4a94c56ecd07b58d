"""Runs whose agents are verifiers: its tasksets, harnesses and training client, by tokens.

Run beside CI, `pytest tests/system/agent_verifiers.py`: a whole run with the small engine for each
of a taskset, a game of TextArena and an environment of OpenEnv.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from actors.engine.character_tokenizer import make_tokenizer
from configs.user_python import UserPython, installed_python
from learner.initial_model import make_model
from tests.system.support.live_run import (
    REPOSITORY,
    TORCH,
    LiveRun,
    assert_nothing_lost_or_repeated,
    end,
)
from tests.system.support.models_that_answer import TEMPLATE
from tests.system.support.verifiers_tasks import COUNTER, LETTERS, WORDS

LONGEST_S = 900.0  # uv installs a gigabyte the first time
pytestmark = [pytest.mark.live, pytest.mark.timeout(2 * LONGEST_S)]

PACKAGES = ("verifiers[openenv,ta]==0.4.0", "uv")
PROGRAM = REPOSITORY / "configs" / "agent" / "play_verifiers.py"
STEPS = 3
SEAT = '{harness = {id = "null"}, runtime = {type = "subprocess"}}'


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python that a host starts with `agents.requirements`."""
    installed = installed_python(UserPython(PACKAGES, None))
    assert installed is not None
    return installed


def trained(folder: Path, python: Path, env: str) -> LiveRun:
    """Train some batches whose episodes verifiers plays."""
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    make_model(tokenizer, layers=1, width=64, tied=True, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    settings = folder / "verifiers.toml"
    settings.write_text(
        f'[env]\n{env}\n[client]\nrenderer_model_name = "{folder}/model"\n'
        '[client.renderer]\nname = "default"\n[sampling]\nmax_tokens = 16\n'
    )
    rows = subprocess.run(
        [str(python), str(PROGRAM), str(settings), "40"], check=True, stdout=subprocess.PIPE
    ).stdout
    (folder / "tasks.jsonl").write_bytes(rows)
    environment = {"path": str(folder / "tasks.jsonl"), "prompt": "name"}
    run = LiveRun(
        folder,
        "tiny.yaml",
        *TORCH,
        f"run.steps={STEPS}",
        f"run.model={folder}/model",
        "run.environment=agent",
        f"run.environment_settings={json.dumps(environment)}",
        "run.max_prompt_tokens=2048",
        "run.max_completion_tokens=1024",
        "run.groups_per_batch=2",
        "run.eval_episodes=0",
        f"agents.requirements={json.dumps(PACKAGES)}",
        f"agents.command={json.dumps(['python', str(PROGRAM), str(settings)])}",
        "agents.serves_many=true",
    )
    with run.up() as process:
        summary = run.finish(process, within_s=LONGEST_S)
    assert_nothing_lost_or_repeated(run, summary)
    assert len(run.lines("metrics")) == STEPS
    return run


def test_a_taskset_trains_and_an_episode_that_fails_is_played_anew(
    tmp_path: Path, python: Path
) -> None:
    (tmp_path / "letters.py").write_text(LETTERS)

    run = trained(tmp_path, python, f'taskset = {{id = "letters"}}\nagent = {SEAT}')

    rewards = [line["reward_mean"] for line in run.lines("metrics")]
    assert all(0.0 < reward < 0.5 for reward in rewards)
    assert [line["reward_parts"]["share"] for line in run.lines("metrics")] == rewards
    reason = "the letters were not there, once"
    assert reason in (run.folder / "logs" / "agents.log").read_text()


def test_a_game_of_textarena_trains(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "nltk_data" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (words / name).write_text("\n".join(WORDS))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))

    taskset = '{id = "textarena", game = "Hangman-v0"}'

    run = trained(tmp_path, python, f"taskset = {taskset}\nplayer = {SEAT}")

    assert all("game_reward" in line["reward_parts"] for line in run.lines("metrics"))


@contextmanager
def counter(folder: Path, python: Path) -> Iterator[str]:
    """A server of OpenEnv; gives its address."""
    (folder / "counter.py").write_text(COUNTER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "counter.log").open("wb") as log:
        server = subprocess.Popen(
            [str(python), "counter.py", str(port)], cwd=folder, stdout=log, stderr=log, text=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
        assert server.poll() is None, (folder / "counter.log").read_text()
    finally:
        end(server)


def test_an_environment_of_openenv_trains(tmp_path: Path, python: Path) -> None:
    resets = ", ".join(["{}"] * 40)

    with counter(tmp_path, python) as url:
        taskset = f'{{id = "openenv", base_url = "{url}", resets = [{resets}]}}'
        run = trained(tmp_path, python, f"taskset = {taskset}\nplayer = {SEAT}")

    assert all(line["reward_mean"] > 0.0 for line in run.lines("metrics"))
