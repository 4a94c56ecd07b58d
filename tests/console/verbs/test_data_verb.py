"""`nyala data check`: what it finds in rows that have something wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from console.main import app
from tests.learner.support.tiny_policy import save_tiny_model

SETTINGS = """
run:
  model: init
  environment: dataset
  environment_settings: {path: PATH, prompt: question, answer: answer, scorer: numeric}
  max_prompt_tokens: 110
  max_completion_tokens: 8
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    rows[3] = rows[2]
    rows[7] = {"question": "1" * 50, "answer": "#### 8 stickers"}
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "mine.yaml"
    config.write_text(SETTINGS.replace("PATH", str(path)))
    return config


def check(config: Path, *arguments: str, code: int = 0) -> dict[str, dict[str, str]]:
    done = CliRunner().invoke(app, ["data", "check", str(config), "--json", *arguments])
    assert done.exit_code == code, done.output
    return {finding["what"]: finding for finding in json.loads(done.stdout)}


def test_rows_of_live_agents_are_counted_but_not_their_prompts(config: Path) -> None:
    """What an agent asks about a row is not known before."""
    found = check(
        config, "--set", "run.environment=agent", "--set", "run.max_prompt_tokens=1", code=0
    )

    assert "rows to train on" in found
    assert "prompt, tokens" not in found


def test_rows_lengths_and_repeated_questions_are_counted(config: Path) -> None:
    found = check(config, "--set", "run.max_prompt_tokens=70", code=1)

    training, held_out = (
        int(found[f"rows {side}"]["found"]) for side in ("to train on", "held out")
    )
    assert training + held_out == 40
    assert found["rows held out"]["advice"] == "an evaluation of 128 asks some twice"
    assert found["columns"]["found"] == "question, answer"
    assert found["questions asked twice"]["found"] == "1"
    prompt, answer = found["prompt, tokens"], found["answer, tokens"]
    assert prompt["found"].startswith("59 to 105, median 60")
    assert "got 70 for 1 of 40 prompts, of up to 105 tokens ('1111" in prompt["advice"]
    assert prompt["advice"].startswith("the run would be refused: run.max_prompt_tokens must be")
    assert answer["advice"].startswith("1 of 40 are too long: raise run.max_completion_tokens")
    assert found["answers, said back to the scorer"]["found"] == "40 of 40 right"


def test_what_it_looks_at_is_what_a_run_would_refuse(config: Path) -> None:
    arguments = ["up", str(config), "--dry-run", "--set", "run.max_prompt_tokens=70"]
    dry_run = CliRunner().invoke(app, arguments)
    assert dry_run.exit_code == 2
    assert "got 70 for 1 of 40 prompts, of up to 105 tokens" in " ".join(dry_run.output.split())

    found = check(config, "--rows", "5")

    assert found["rows looked at"]["found"] == "5 of 40; prompts of all"
    assert found["prompt, tokens"]["found"].startswith("59 to 105, median 60")
    assert found["prompt, tokens"]["advice"] == ""


@pytest.mark.parametrize(
    ("own", "finding", "advice"),
    [
        ("held_out: PATH", "rows to train on", "none is left to train on; hold out fewer"),
        ("held_out: EMPTY", "rows held out", "name a file as held_out, or set run.eval_episodes"),
    ],
)
def test_a_side_without_rows_that_a_run_needs_is_an_error(
    config: Path, own: str, finding: str, advice: str
) -> None:
    empty = config.with_name("empty.jsonl")
    empty.write_text("")
    path = str(config.with_name("sums.jsonl"))
    own = own.replace("PATH", path).replace("EMPTY", str(empty))
    config.write_text(config.read_text().replace("scorer: numeric", f"scorer: numeric, {own}"))

    found = check(config, code=1)

    assert found[finding]["advice"].startswith("the run would be refused: ")
    assert advice in found[finding]["advice"]


def test_a_scorer_that_does_not_take_its_own_answers_is_shown(config: Path) -> None:
    text = config.read_text().replace("scorer: numeric", "scorer: choice")
    path = config.with_name("choices.jsonl")
    path.write_text('{"question": "?", "answer": "B"}\n{"question": "!", "answer": "C, or B"}\n')
    config.write_text(text.replace("sums.jsonl", "choices.jsonl"))
    done = CliRunner().invoke(app, ["data", "check", str(config)])

    assert done.exit_code == 2
    assert "answer of row 2 of" in done.output
    assert "must be a letter, got 'C, or B'" in done.output


@pytest.mark.parametrize(
    ("answer", "scorer", "is_advised"),
    [
        ("\\frac{1}{2}", "exact", True), ("\\frac{1}{2}", "numeric", True),
        ("x^{2}", "exact", True),
        ("\\d{2}", "regex", False), ("7", "exact", False), ("C:/x_y", "exact", False),
    ],
)  # fmt: skip
def test_math_verify_is_advised_for_answers_in_latex(
    config: Path, answer: str, scorer: str, is_advised: bool
) -> None:
    rows = [{"question": f"{i}+1=", "answer": answer} for i in range(40)]
    config.with_name("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    found = check(config, "--set", f"run.environment_settings.scorer={scorer}")

    assert ("answers in LaTeX" in found) is is_advised
    if is_advised:
        assert found["answers in LaTeX"]["found"] == "40 of 40"
        assert "scorer: math-verify" in found["answers in LaTeX"]["advice"]


def test_an_expression_that_numeric_cannot_compare_is_refused_with_the_scorer_that_can(
    config: Path,
) -> None:
    config.with_name("sums.jsonl").write_text('{"question": "?", "answer": "\\\\sqrt{2}"}\n')
    done = CliRunner().invoke(app, ["data", "check", str(config)])

    assert done.exit_code == 2
    assert "scorer: math-verify compares expressions" in " ".join(done.output.split())


def test_reward_functions_judge_right_answers_and_empty_ones(config: Path) -> None:
    rewards = config.with_name("rewards.py")
    rewards.write_text("def right(completion, answer):\n    return float(completion == answer)\n")

    found = check(config, "--set", f"run.reward={rewards}:right")

    assert found["reward of 8 right answers"]["found"] == "right 1.000"
    assert found["reward of 8 empty answers"]["found"] == "right 0.000"


@pytest.mark.parametrize("body", ["0.0", "-1.0", "float(completion == \"{'a': '1'}\")"])
def test_a_reward_that_gives_nothing_for_a_right_answer_is_an_error(
    config: Path, body: str
) -> None:
    rewards = config.with_name("rewards.py")
    rewards.write_text(f"def none(completion, answer):\n    return {body}\n")

    found = check(config, "--set", f"run.reward={rewards}:none", code=1)

    advice = found["reward of 8 right answers"]["advice"]
    assert advice.startswith("the run would reward nothing: no right answer gets more than an")


@pytest.mark.parametrize(
    "body",
    [
        "float(completion == f'<answer>{answer}</answer>')",  # a form that the function asks for
        "-abs(len(completion) - len(answer))",
        "environment_reward",
    ],
)
def test_a_reward_that_a_right_answer_can_earn_is_none(config: Path, body: str) -> None:
    rewards = config.with_name("rewards.py")
    rewards.write_text(f"def some(completion, answer, environment_reward):\n    return {body}\n")

    found = check(config, "--set", f"run.reward={rewards}:some")

    assert "nothing" not in found["reward of 8 right answers"]["advice"]


def test_rows_made_for_verl_are_judged_as_in_a_run(config: Path) -> None:
    rows = [
        {
            "data_source": "my/sums",
            "prompt": [{"role": "user", "content": f"{i}+8="}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 8)},
            "extra_info": {"level": i % 2},
        }
        for i in range(40)
    ]
    config.with_name("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = config.with_name("rewards.py")
    rewards.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'my/sums' and extra_info['level'] in (0, 1)\n"
        "    return float(solution_str == ground_truth)\n"
    )
    own = {"path": str(config.with_name("sums.jsonl")), "answer": "reward_model.ground_truth"}
    arguments = ("--set", f"run.reward={rewards}:score", "--set", "run.environment_settings=")

    found = check(config, *arguments[:3], arguments[3] + json.dumps(own))

    assert found["reward of 8 right answers"]["found"] == "score 1.000"
    assert found["reward of 8 empty answers"]["found"] == "score 0.000"


CHAT = """
def said(prompts, completions, **kwargs):
    return [float(c[0]["content"] == p[-1]["content"][0]) for p, c in zip(prompts, completions)]
"""


def test_reward_functions_get_messages_where_prompts_are_messages(config: Path) -> None:
    rows = [
        {"question": [{"role": "user", "content": f"{i}"}], "answer": f"{i}"} for i in range(10)
    ]
    config.with_name("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.with_name("rewards.py").write_text(CHAT)

    found = check(config, "--set", f"run.reward={config.with_name('rewards.py')}:said")

    assert found["reward of 8 right answers"]["found"] == "said 1.000"
    assert found["reward of 8 empty answers"]["found"] == "said 0.000"


def test_each_dataset_of_several_is_looked_at_under_its_name(config: Path) -> None:
    sums, exam = config.with_name("sums.jsonl"), config.with_name("exam.jsonl")
    exam.write_text("".join(f'{{"question": "{i}*2=", "answer": "{2 * i}"}}\n' for i in range(9)))
    columns = "prompt: question, answer: answer"
    config.write_text(f"""
run:
  model: init
  environments:
    - {{environment: calculator}}
    - name: sums
      environment: dataset
      environment_settings: {{path: {sums}, {columns}}}
    - name: exam
      environment: dataset
      environment_settings: {{path: {exam}, held_out: {exam}, {columns}}}
      share: 0
""")
    done = CliRunner().invoke(app, ["data", "check", str(config), "--json"])

    assert done.exit_code == 0, done.output
    found = {(row["environment"], row["what"]): row["found"] for row in json.loads(done.stdout)}
    assert {name for name, _ in found} == {"sums", "exam"}
    assert (found["exam", "rows to train on"], found["exam", "rows held out"]) == ("0", "9")

    config.write_text(config.read_text().replace("share: 0", "share: 1"))
    up = CliRunner().invoke(app, ["up", str(config), "--dry-run"])
    assert "path must have rows to train on, got none that is not held out among 9" in up.output


@pytest.mark.slow
def test_the_tokens_of_a_model_in_the_home_folder_are_counted(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(config.with_name("model"))
    monkeypatch.setenv("HOME", str(config.parent))

    found = check(config, "--set", "run.model=~/model")

    assert found["rows to train on"]["found"].isdigit()
    assert "run.max_prompt_tokens" in found["prompt, tokens"]["found"]


@pytest.mark.slow
def test_an_answer_is_counted_without_the_template(config: Path) -> None:
    model = config.with_name("model")
    save_tiny_model(model)
    template = (
        "{% for m in messages %}{{ m['content'] }}~{% endfor %}"
        "{% if add_generation_prompt %}7+7+7+7+7+7+7+7+{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    rows = [{"question": f"{i}+1=", "answer": "15"} for i in range(9)]
    config.with_name("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    found = check(config, "--set", f"run.model={model}")

    assert found["answer, tokens"]["found"].startswith("3 to 3, median 3")
    assert found["prompt, tokens"]["found"].split()[0] not in ("3", "4")


def test_a_run_without_a_dataset_is_refused(config: Path) -> None:
    arguments: list[Any] = ["data", "check", str(config), "--set", "run.environment=calculator"]
    done = CliRunner().invoke(app, arguments)

    assert done.exit_code == 2
    assert "run.environment must be dataset or agent, got calculator" in done.output


def test_rows_that_a_class_plays_are_counted_by_their_columns(config: Path) -> None:
    rows = [{"question": "Spend it.", "budget": i % 39} for i in range(40)]
    path = config.with_name("budgets.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    factory = f"path: {path}, prompt: question, factory: 'shop.py:Shop'"

    found = check(config, "--set", f"run.environment_settings={{{factory}}}")

    counts = (int(found[f"rows {side}"]["found"]) for side in ("to train on", "held out"))
    assert sum(counts) == 40
    assert found["questions asked twice"]["found"] == "1"
