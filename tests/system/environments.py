"""Environments of every kind through the ring, and some that are learnt, with real vLLM.

Run beside CI, `pytest tests/system/environments.py`: a whole run for each.
"""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.engine.tokenizer import ModelTokenizer
from actors.environments.adapters.tools import Tools
from configs.settings import LearnerSettings
from console.main import app
from learner.initial_model.character_model import make_tokenizer
from learner.initial_model.warm_start import warm_start
from tests.actors.support.judge_server import JudgeServer
from tests.system.support.live_run import LiveRun, assert_nothing_lost_or_repeated

LONGEST_S = 1200.0
pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(2 * LONGEST_S),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]

STEPS = 3
FEW_STEPS = (
    f"run.steps={STEPS}",
    "run.max_prompt_tokens=2048",
    "run.max_completion_tokens=64",
    "learner.warm_start_steps=0",
)

FULL_QUESTIONS = {
    "algebra": ("simple_equations", "polynomial_equations"),
    "algorithmic": ("string_manipulation", "spiral_matrix"),
    "arithmetic": ("leg_counting", "fraction_simplification"),
    "cognition": ("number_sequence", "needle_haystack"),
    "graphs": ("family_relationships", "shortest_path"),
    "logic": ("propositional_logic", "knights_knaves"),
}
"""Datasets of reasoning-gym by category; the whole question is asked."""

COMPACT = {"prompt_style": "compact", "dense": True}
LEARNING: dict[str, dict[str, int]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
    "number_sorting": {
        "min_numbers": 3,
        "max_numbers": 4,
        "min_value": 0,
        "max_value": 9,
        "max_decimals": 0,
    },
}
"""Settings of datasets that the small model of the demo learns in three minutes."""
MORE_ANSWERS = 0.15

GUESS = """
import random

class Guess:
    def reset(self, *, seed=None):
        self.number, self.left = random.Random(seed).randint(0, 9), 3
        return "Guess a digit.", {}

    def step(self, text):
        self.left -= 1
        right = text.strip() == str(self.number)
        told = "" if right else "higher" if text < str(self.number) else "lower"
        return told, float(right), right or not self.left, False, {"is_success": right}
"""

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<eos>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Of a chat model that lists tools and calls them in Hermes' form."""

SHOP = '''
class Shop:
    def reset(self, budget: int, **row) -> None:
        self.left = budget

    def pay(self, n: int) -> str:
        """Pay.

        Args:
            n: How much.
        """
        self.left -= n
        return f"{self.left} left"

    def get_reward(self) -> float:
        return float(self.left == 0)
'''


@pytest.mark.parametrize("dataset", [name for names in FULL_QUESTIONS.values() for name in names])
def test_a_dataset_of_reasoning_gym_goes_through(tmp_path: Path, dataset: str) -> None:
    _finish(LiveRun(tmp_path, "tiny.yaml", *FEW_STEPS, *_settings(dataset=dataset)))


def test_rows_of_a_file_go_through(tmp_path: Path) -> None:
    rows = _write(tmp_path / "rows.jsonl", *({"ask": f"{n}+1=", "sum": n + 1} for n in range(99)))
    settings = _settings(path=rows, prompt="ask", answer="sum", scorer="numeric")

    _finish(LiveRun(tmp_path, "tiny.yaml", *FEW_STEPS, "run.environment=dataset", *settings))


def test_a_game_with_gymnasiums_methods_goes_through(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(GUESS)
    run = LiveRun(
        tmp_path, "tiny.yaml", *FEW_STEPS, f"run.environment={tmp_path}/env.py:Guess", *_settings()
    )

    _finish(run)

    assert _has_observations(run)


def test_a_class_with_tools_goes_through(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(SHOP)
    asked = ({"ask": f"Pay all, {n}.", "budget": 5} for n in range(10, 100))
    rows = _write(tmp_path / "rows.jsonl", *asked)
    settings = _settings(path=rows, prompt="ask", factory=f"{tmp_path}/env.py:Shop")
    run = LiveRun(
        tmp_path,
        "tiny.yaml",
        *FEW_STEPS,
        "run.environment=dataset",
        f"run.model={_model_that_calls(tmp_path)}",
        "run.max_completion_tokens=128",
        *settings,
    )

    _finish(run)

    assert _has_observations(run)
    assert any(line["reward_mean"] > 0 for line in run.lines("metrics"))


def test_programs_are_run(tmp_path: Path) -> None:
    program = "```python\ndef f(x):\n return x*x\n```"
    tests = ({"ask": f"{n}:", "test": f"assert f({n}) == {n * n}"} for n in range(100, 200))
    rows = _write(tmp_path / "rows.jsonl", *tests)
    model = _model_that_says(tmp_path, [f"{n}:" for n in range(100, 200)], (program, True))
    settings = _settings(
        path=rows, prompt="ask", answer="test", scorer="code", answer_format="", time_limit_s=2
    )
    run = LiveRun(
        tmp_path,
        "tiny.yaml",
        *FEW_STEPS,
        "run.environment=dataset",
        f"run.model={model}",
        *settings,
    )

    summary = _finish(run)

    assert summary["held_out_accuracy_before"] > 0.5


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    """A stand-in for a language model: it scores by length."""
    server = JudgeServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_judge_goes_through(
    tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "rubric.txt").write_text("Judge this.\nANSWER: {completion}")
    (tmp_path / "judge.py").write_text(
        "from actors.rewards.judge import Judge\n"
        f"helpful = Judge(url={judge.url!r}, model='m', rubric={str(tmp_path / 'rubric.txt')!r})\n"
    )

    reward = f"run.reward={tmp_path}/judge.py:helpful"

    _finish(LiveRun(tmp_path, "tiny.yaml", *FEW_STEPS, "run.max_completion_tokens=8", reward))

    assert judge.letters


@pytest.mark.parametrize("dataset", LEARNING)
def test_a_dataset_is_learnt_with_vllm(tmp_path: Path, dataset: str) -> None:
    settings = _settings(dataset=dataset, **COMPACT, **LEARNING[dataset])
    shorter = ("run.steps=60", "run.eval_every=20", "learner.lr=4e-4", "actors.count=1")

    _learn(LiveRun(tmp_path, "demo.yaml", *settings, *shorter))


def test_a_new_project_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["new", "fresh"]).exit_code == 0
    (tmp_path / "runs").mkdir()

    _learn(LiveRun(tmp_path / "runs", str(tmp_path / "fresh" / "fresh.yaml")))


def _learn(run: LiveRun) -> None:
    with run.up() as process:
        summary = run.finish(process, within_s=LONGEST_S)
    before, after = summary["held_out_accuracy_before"], summary["held_out_accuracy_after"]
    print(f"{before} -> {after}")
    assert after - before >= MORE_ANSWERS


def _finish(run: LiveRun) -> dict[str, Any]:
    with run.up() as process:
        summary = run.finish(process, within_s=LONGEST_S)
    assert summary["steps"] == STEPS
    assert_nothing_lost_or_repeated(run, summary)
    return summary


def _has_observations(run: LiveRun) -> bool:
    """Whether an episode had a second turn: what the environment said is not trained."""
    return any(line["trained_tokens"] < line["completion_tokens"] for line in run.lines("metrics"))


def _settings(**settings: object) -> list[str]:
    return [f"run.environment_settings={json.dumps(settings)}"]


def _write(path: Path, *rows: Mapping[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _model_that_calls(folder: Path) -> Path:
    """Train a small model to call the tool once and then to end its turn."""
    tools = Tools.of(runpy.run_path(str(folder / "env.py"))["Shop"](), setting="Shop").schemas
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    asked = ModelTokenizer(str(folder / "tokenizer"))
    prompts = [asked.decode(asked.encode_prompt(f"Pay all, {n}.", tools)) for n in range(10, 100)]
    call = '<tool_call>{"name": "pay", "arguments": {"n": 5}}</tool_call>'
    result = "[tool]0 left<eos>[assistant]"
    model = _model_that_says(folder, prompts, (call, True), (result, False), ("paid", True))
    tokenizer.save_pretrained(model)
    return model


def _model_that_says(folder: Path, prompts: Sequence[str], *said: tuple[str, bool]) -> Path:
    """Train a small model to answer all with the same."""
    pairs, model = folder / "pairs.jsonl", folder / "model"
    _write(pairs, *({"prompt": prompt, "segments": said} for prompt in prompts))
    learner = LearnerSettings(
        init_layers=1, init_width=64, warm_start_steps=120, warm_start_batch=16, warm_start_lr=3e-3
    )
    warm_start(learner, seed=0, pairs_path=pairs, out=model)
    return model
