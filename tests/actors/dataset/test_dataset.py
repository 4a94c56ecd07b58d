"""The environment `dataset`: its rows, their order, their two sides, and what is refused."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import configs.hashes
from actors.environments.dataset.environment import Dataset
from actors.environments.registry import check_environment
from configs.errors import SettingsError
from configs.hashes import run_hashes
from configs.settings import RunSettings


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(n: int) -> list[dict[str, Any]]:
    return [{"question": f"{i}+1=", "answer": f"#### {i + 1}", "level": i % 3} for i in range(n)]


def make(folder: Path, n: int = 50, **settings: Any) -> Dataset:
    path = write(folder / "sums.jsonl", sums(n))
    given = {"path": str(path), "prompt": "question", "answer": "answer", "scorer": "numeric"}
    return Dataset(**given | settings)


def prompts(dataset: Dataset, indices: range, *, held_out: bool = False) -> list[Any]:
    return [dataset.begin(i, 9, held_out=held_out).prompt for i in indices]


def test_a_row_is_asked_scored_and_given_to_rewards(tmp_path: Path) -> None:
    conversation = make(tmp_path).begin(0, 1, held_out=False)
    number = int(str(conversation.prompt).partition("+")[0])

    assert conversation.prompt == (
        f"{number}+1=\n\nPut your final answer between <answer> and </answer>."
    )
    assert conversation.columns == sums(50)[number]
    conversation.step(f"<think>1, 2</think>It makes <answer>{number + 1}.0</answer>.")
    assert conversation.score().parts == {"exact": 1.0}
    conversation.step("I do not know")
    assert conversation.score().metrics == {"unparsed": 1.0}
    assert conversation.score().reward == 0.0


def test_every_row_comes_once_in_each_pass_and_in_another_order(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    n = len(set(prompts(dataset, range(200))))

    passes = [prompts(dataset, range(i * n, i * n + n)) for i in range(3)]

    assert all(len(set(each)) == n for each in passes)
    assert len({tuple(each) for each in passes}) == 3


def test_an_item_is_the_same_in_another_process_and_whatever_was_asked_before(
    tmp_path: Path,
) -> None:
    first, second = make(tmp_path), make(tmp_path)
    assert prompts(first, range(400)) == prompts(first, range(400))

    assert prompts(second, range(300, 400)) == prompts(first, range(300, 400))
    assert prompts(make(tmp_path, seed=1), range(20)) != prompts(first, range(20))


def test_training_and_held_out_rows_are_all_rows_and_share_none(tmp_path: Path) -> None:
    dataset = make(tmp_path, 200)
    training = set(prompts(dataset, range(1000)))
    held_out = set(prompts(dataset, range(1000), held_out=True))

    assert not training & held_out
    assert len(training) + len(held_out) == 200
    assert 5 <= len(held_out) <= 40


def test_a_question_of_the_held_out_file_is_not_trained(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held_out.jsonl", sums(10))
    dataset = make(tmp_path, held_out=str(held_out))

    assert len(set(prompts(dataset, range(1000), held_out=True))) == 10
    assert len(set(prompts(dataset, range(1000)))) == 40


def test_rows_that_a_class_plays_are_told_apart_by_all_their_columns(tmp_path: Path) -> None:
    rows = [{"question": "Spend it.", "budget": i % 100} for i in range(200)]
    path = str(write(tmp_path / "budgets.jsonl", rows))
    settings: dict[str, Any] = {"path": path, "prompt": "question", "factory": "shop.py:Shop"}
    held_out = str(write(tmp_path / "held_out.jsonl", rows[:10]))

    split, given = Dataset(**settings), Dataset(**settings, held_out=held_out)

    budgets = [
        {split.begin(i, 0, held_out=side).columns["budget"] for i in range(400)}
        for side in (False, True)
    ]
    assert len(budgets[0]) + len(budgets[1]) == 100 and 2 <= len(budgets[1]) <= 25
    assert given.counts == (180, 10, 20)


def test_prompts_are_written_out_or_messages(tmp_path: Path) -> None:
    written = make(tmp_path, prompt="Level {level}: {question}", answer_format="")
    assert str(written.begin(0, 1, held_out=False).prompt).startswith("Level ")

    system = {"role": "system", "content": "Be brief."}
    rows = [{"chat": [system, {"role": "user", "content": f"{i}?"}]} for i in range(30)]
    path = write(tmp_path / "chats.jsonl", rows)
    chat = Dataset(path=str(path), prompt="chat", answer_format="Answer in one word.")

    prompt = chat.begin(0, 1, held_out=False).prompt
    assert not isinstance(prompt, str)
    assert prompt[0] == system
    assert prompt[1]["content"].endswith("?\n\nAnswer in one word.")


def test_rows_without_answers_are_judged_by_a_reward_function_alone(tmp_path: Path) -> None:
    conversation = make(tmp_path, answer=None).begin(0, 1, held_out=False)

    assert (conversation.answer, conversation.score().parts) == (None, {})
    assert "<answer>" not in str(conversation.prompt)


@pytest.mark.parametrize(
    ("rows", "settings", "answer"),
    [
        (
            [{"question": "1", "answer": "2"}],
            {"prompt": "prompt"},
            "got prompt; row 1 has question",
        ),
        ([{"question": "1", "answer": "2"}], {"answer": "label"}, "name columns of .* got label"),
        ([{"question": "", "answer": "2"}], {}, "row 1 of .* must have a text or messages to ask"),
        (
            [{"question": "fine", "answer": "1"}, {"question": ["a", "b"], "answer": "2"}],
            {},
            r"question of row 2 of .*bad.jsonl must be a text, .* list of texts, \['a', 'b'\]",
        ),
        (
            [{"question": [{"role": "user"}], "answer": "2"}],
            {},
            "question of row 1 of .*bad.jsonl must be a text, or messages of role and content",
        ),
        (
            [{"question": [{"role": "assistant", "content": "so"}], "answer": "2"}],
            {},
            "question of row 1 of .*bad.jsonl must end with a message to the policy",
        ),
        ([{"question": "1", "answer": None}], {}, "must have an answer in answer, got none"),
        ([{"question": "1", "answer": "two"}], {}, "answer of row 1 .* must have a number, got"),
        *(
            ([{"question": "1", "answer": given}], {"scorer": scorer}, "must be a text or a number")
            for given in (["15"], {"ground_truth": "15"}, [15])
            for scorer in ("exact", "numeric", "choice", "regex", "math-verify")
        ),
        (["1"], {}, "line 1 of .* must be an object of columns"),
        ([], {}, "must have rows to train on, got none that is not held out among 0 "),
    ],
)
def test_a_row_that_cannot_be_asked_or_scored_is_named(
    tmp_path: Path, rows: list[Any], settings: dict[str, Any], answer: str
) -> None:
    path = write(tmp_path / "bad.jsonl", rows)
    given = {"path": str(path), "prompt": "question", "answer": "answer", "scorer": "numeric"}

    with pytest.raises(SettingsError, match=answer):
        Dataset(**given | settings).begin(0, 0, held_out=False)


def verl_rows(n: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": "my/sums",
            "prompt": [{"role": "user", "content": f"What is {i} + 8?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 8)},
            "extra_info": {"split": "train", "index": i, "level": "hard", "say": [f"{i} and 8"]},
        }
        for i in range(n)
    ]


@pytest.mark.parametrize("answer", ["reward_model.ground_truth", "{reward_model.ground_truth}"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_made_for_verl_are_named_by_what_lies_in_their_columns(
    tmp_path: Path, answer: str, ending: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        write(path, verl_rows(20))
    else:
        arrow = pytest.importorskip("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(
            arrow.Table.from_pylist(verl_rows(20)), path
        )

    by_column = Dataset(path=str(path), answer=answer)
    by_words = Dataset(
        path=str(path), prompt="{extra_info.level}: {extra_info.say.0}", answer=answer
    )

    items = [item for item, _ in by_column.all_rows()]
    right = {row["prompt"][0]["content"]: row["reward_model"] for row in verl_rows(20)}
    assert len(items) == 20
    for item in items:
        asked = str(item.prompt[0]["content"]).partition("\n")[0]  # type: ignore[index]
        assert item.answer == right[asked]["ground_truth"]
        item.step(str(item.answer))
        assert item.score().reward == 1.0
    said = [str(item.prompt).partition("\n")[0] for item, _ in by_words.all_rows()]
    assert sorted(said) == sorted(f"hard: {i} and 8" for i in range(20))


def test_a_column_with_a_point_in_its_name_comes_before_what_lies_in_another(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": "1+1=", "sum.text": "2", "sum": {"text": "3"}}]

    dataset = Dataset(path=str(write(tmp_path / "rows.jsonl", rows)), answer="sum.text")

    assert [item.answer for item, _ in dataset.all_rows()] == ["2"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"answer": "reward_model.answer"},
            r"got reward_model.answer; row 1 has .*reward_model.style, reward_model.ground_truth",
        ),
        ({"answer": "extra_info.say.1"}, r"must name columns of .*, got extra_info.say.1; row 1"),
        ({"answer": "reward_model"}, r"must be a text or a number, .* such as reward_model.ground"),
        ({"answer": "{reward_model}"}, r"{reward_model} of row 1 .* such as {reward_model.style}"),
        ({"answer": "#### {extra_info.say}"}, r"{extra_info.say} of row 1 .*{extra_info.say.0}"),
        ({"prompt": "Now: {prompt}"}, r"{prompt} of row 1 of .* must be a text or a number, got"),
        ({"prompt": "{note}"}, r"{note} of row 1 of .* got None; write a text there"),
        ({"prompt": "texts"}, r"texts of row 1 of .* must be a text, or messages of role and"),
        (
            {"prompt": "{reward_model.ground_truth}?", "answer": "reward_model.ground_truth"},
            r"must not have the column of the answer, got {reward_model.ground_truth}",
        ),
    ],
)
def test_what_is_no_text_is_never_written_as_python_writes_it(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    rows = [row | {"note": None, "texts": ["1", "2"]} for row in verl_rows(1)]

    with pytest.raises(SettingsError, match=named):
        Dataset(path=str(write(tmp_path / "rows.jsonl", rows)), **settings)


def test_tests_and_schemas_reach_a_reward_as_json(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["é"], "additionalProperties": True}
    rows = [{"prompt": "JSON, please", "answer": schema}]

    dataset = Dataset(
        path=str(write(tmp_path / "rows.jsonl", rows)), answer="answer", scorer="json_schema"
    )

    assert [json.loads(item.answer or "") for item, _ in dataset.all_rows()] == [schema]


def test_settings_that_are_wrong_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", sums(30))

    def run(**settings: Any) -> RunSettings:
        given = {"path": str(path), "prompt": "question"} | settings
        return RunSettings(model="init", environment="dataset", environment_settings=given)

    assert str(check_environment(run()).prompt).endswith("+1=")
    with pytest.raises(SettingsError, match=r"environment_settings.scorer must be valid"):
        check_environment(run(scorer="nearly"))
    with pytest.raises(SettingsError, match=r"environment_settings.colour must be valid"):
        check_environment(run(colour="red"))
    with pytest.raises(SettingsError, match=r"must be a readable file, got /nowhere"):
        check_environment(run(path="/nowhere/rows.jsonl"))
    with pytest.raises(SettingsError, match=r"must end with one of .jsonl, .json, .csv"):
        check_environment(run(path=__file__))


def test_without_held_out_rows_an_evaluation_is_refused_with_the_way_out(tmp_path: Path) -> None:
    dataset = make(tmp_path, 2)

    with pytest.raises(
        SettingsError, match=r"name a file with other rows as held_out, or set run.eval"
    ):
        dataset.begin(0, 1, held_out=True)


def test_an_actor_with_another_file_is_told_apart_and_one_with_a_copy_is_not(
    tmp_path: Path,
) -> None:
    def hashes(folder: str, n: int) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        path = write(tmp_path / folder / "sums.jsonl", sums(n))
        given = {"path": str(path), "prompt": "question"}
        run = RunSettings(model="init", environment="dataset", environment_settings=given)
        return run_hashes(run)

    here, copy, other = hashes("here", 5), hashes("copy", 5), hashes("other", 6)

    assert here["settings"] == copy["settings"] == other["settings"]
    assert here["environment"] == copy["environment"] != other["environment"]


@pytest.mark.parametrize(("scorer", "package"), configs.hashes.JUDGING.items())
def test_an_actor_whose_judge_is_of_another_release_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scorer: str, package: str
) -> None:
    path = write(tmp_path / "sums.jsonl", sums(5))

    def hashed(scorer: str, release: str) -> str:
        monkeypatch.setattr(configs.hashes, "version", {package: release}.__getitem__)
        given = {"path": str(path), "prompt": "question", "answer": "answer", "scorer": scorer}
        run = RunSettings(model="init", environment="dataset", environment_settings=given)
        return run_hashes(run)["environment"]

    monkeypatch.setattr(configs.hashes, "PackageNotFoundError", KeyError)
    assert hashed(scorer, "0.9") == hashed(scorer, "0.9") != hashed(scorer, "0.9.1")
    assert hashed("exact", "0.9") == hashed("exact", "0.9.1")


def test_doubled_braces_in_a_prompt_are_text(tmp_path: Path) -> None:
    dataset = make(tmp_path, prompt="{question} Write \\boxed{{answer}}.", answer_format="")

    assert str(dataset.begin(0, 0, held_out=False).prompt).endswith("+1= Write \\boxed{answer}.")


def test_a_prompt_that_tells_the_answer_is_refused(tmp_path: Path) -> None:
    for answer in ("answer", "{answer}"):
        with pytest.raises(SettingsError, match=r"prompt must not have the column of the answer"):
            make(tmp_path, prompt="{question} Write \\boxed{answer}.", answer=answer)

    make(tmp_path, prompt="{question}: {answer}", scorer="regex")  # a pattern may be told
