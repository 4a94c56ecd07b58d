"""`run.environments`: which environment an item is of, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from configs.errors import SettingsError
from configs.hashes import run_hashes, settings_hash
from configs.loader import load, save
from configs.settings import RunSettings
from configs.tables.environments import BLOCK, Mixture, MixtureItem

PINNED = [(0, 0), (0, 1), (1, 0), (1, 299), (0, 700), (1, 3703)]
SETTINGS_HASH = "09200dfdf84c42548ea7ba3bb6c84688e0b1281b5fda730ad0a3b92c2726817a"
SUMS, WORDS = {"name": "sums", "environment": "calculator"}, {"environment": "reasoning_gym"}


def mixture(*shares: float, seed: int = 3) -> Mixture:
    return Mixture(seed, shares=shares, eval_episodes=[0] * len(shares))


def run_of(*environments: dict[str, Any], **run: Any) -> RunSettings:
    return RunSettings(model="init", environments=environments, **run)


def test_the_place_of_an_item_follows_from_seed_and_number_for_ever():
    found = [mixture(0.7, 0.3).training(item) for item in (0, 1, 2, 999, 1000, 12345)]

    assert found == [mixture(7, 3).training(item) for item in (0, 1, 2, 999, 1000, 12345)]
    assert found == PINNED  # a resumed run must ask what it asked before
    other = [mixture(0.7, 0.3, seed=4).training(item) for item in range(100)]
    assert other != [mixture(0.7, 0.3).training(item) for item in range(100)]


def test_every_environment_has_its_share_of_any_stretch_and_its_items_without_gaps():
    shares = (0.5, 0.3, 0.2, 0.0)
    places = [mixture(*shares).training(item) for item in range(3 * BLOCK)]

    for environment, share in enumerate(shares):
        indices = [place.item for place in places if place.environment == environment]
        assert indices == list(range(round(3 * BLOCK * share)))
    for start in range(0, 3 * BLOCK, 50):
        counts = Counter(place.environment for place in places[start : start + 50])
        assert all(abs(counts[i] - 50 * share) <= 2 for i, share in enumerate(shares))


def test_shares_that_do_not_divide_a_block_are_kept_to_a_thousandth():
    places = [mixture(1, 1, 1).training(item).environment for item in range(BLOCK)]

    assert sorted(Counter(places).values()) == [333, 333, 334]


def test_one_environment_has_the_items_themselves():
    alone = RunSettings(model="init", environment="calculator", eval_episodes=5)
    same = run_of(SUMS, eval_episodes=5)

    for run in (alone, same):
        assert [run.mixture.training(item) for item in (0, 7, 1234)] == [(0, 0), (0, 7), (0, 1234)]
        assert run.mixture.held_out(4) == (0, 4)
        assert run.mixture.num_questions == 5


def test_an_evaluation_asks_each_environment_its_own_number_of_questions():
    run = run_of(SUMS, WORDS | {"share": 0, "eval_episodes": 2}, eval_episodes=3)

    asked = [run.mixture.held_out(item) for item in range(run.mixture.num_questions)]

    assert asked == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert {run.mixture.training(item).environment for item in range(BLOCK)} == {0}


def test_each_environment_alone_has_what_it_leaves_out_from_the_run():
    run = run_of(
        SUMS | {"reward": "own.py:f", "environment_settings": {"max_operand": 3}, "share": 2},
        WORDS | {"share": 0, "eval_episodes": 7},
        reward="all.py:g",
    )

    alone = run.by_environment

    assert list(alone) == ["sums", "reasoning_gym"]
    sums, words = alone.values()
    assert (sums.environment, sums.environment_settings) == ("calculator", {"max_operand": 3})
    assert (sums.reward, words.reward) == ("own.py:f", "all.py:g")
    assert (sums.eval_episodes, words.eval_episodes) == (128, 7)
    assert (run.is_trained, sums.is_trained, words.is_trained) == (True, True, False)
    assert {name: list(each.by_environment) for name, each in alone.items()} == {
        name: [name] for name in alone
    }
    assert words.mixture.held_out(6) == MixtureItem(0, 6)


@pytest.mark.parametrize(
    ("environments", "run", "message"),
    [
        ("[{environment: calculator}, {environment: calculator}]", [], "must have different names"),
        ("[{environment: calculator}]", ["run.environment=dataset"], "must be left out where"),
        ("[{environment: calculator, share: 0}]", [], "must have one with a share above 0"),
        (
            "[{environment: calculator, share: 1e-4}, {environment: reasoning_gym}]",
            [],
            "must have shares of at least a thousandth of their sum",
        ),
        ("[{environment: calculator, shar: 1}]", [], "shar"),
        ("[{environment: calculator, reward: [a.py:f, b.py:f]}]", [], "different names"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, environments: str, run: list[str], message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"run: {{model: init, environments: {environments}}}\n")

    with pytest.raises(SettingsError, match=message):
        load(path, run)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            ["run.sampler=difficulty"],
            (
                "run.sampler_prompts must be set where run.sampler is difficulty, got null for "
                "words; set it to the number of its training rows"
            ),
        ),
        (
            ["run.sampler=hardest", "run.sampler_prompts=5"],
            (
                "run.sampler must be uniform, difficulty, path/to/file.py:function or "
                "module:function, "
                'got "hardest"'
            ),
        ),
        (["run.sampler_prompts=0"], "run.sampler_prompts must be a whole number >= 1"),
    ],
)
def test_a_sampler_needs_a_name_and_its_prompts(
    tmp_path: Path, run: list[str], message: str
) -> None:
    path = tmp_path / "mine.yaml"
    environments = (
        "[{environment: calculator, sampler_prompts: 9}, {environment: dataset, share: 0}, "
        "{environment: reasoning_gym, name: words}]"
    )
    path.write_text(f"run: {{model: init, environments: {environments}}}\n")

    with pytest.raises(SettingsError, match=message):
        load(path, run)

    assert load(path, ["run.sampler=difficulty", "run.sampler_prompts=5"])


def test_a_sampler_beside_the_settings_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def choose(seed, group, pool):\n    return 0\n")
    path = tmp_path / "mine.yaml"
    path.write_text("run: {model: init, sampler: 'mine.py:choose', sampler_prompts: 5}\n")

    assert load(path).run.sampler == f"{tmp_path}/mine.py:choose"


def test_settings_with_several_environments_are_the_same_when_they_are_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("run: {model: init, environments: [{environment: calculator, share: 0.5}]}\n")
    settings = load(path)

    save(settings, path)

    assert load(path) == settings


def test_the_contents_of_every_environment_and_reward_are_compared(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "f.py"):
        (tmp_path / name).write_text(f'{{"prompt": "{name}"}}\n')

    def hashes(folder: Path = tmp_path, share: float = 1.0) -> dict[str, str]:
        data = [
            {
                "name": name,
                "environment": "dataset",
                "environment_settings": {"path": str(folder / f"{name}.jsonl")},
                "share": share,
                "reward": f"{folder}/f.py:{name}",
            }
            for name in ("a", "b")
        ]
        return run_hashes(run_of(*data))

    before = hashes()
    assert before["settings"] != hashes(share=0.5)["settings"]
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("a.jsonl", "b.jsonl", "f.py"):
        (copy / name).write_text((tmp_path / name).read_text())
    assert hashes(copy)["settings"] == before["settings"]
    assert hashes(copy)["reward"] == before["reward"]
    (copy / "b.jsonl").write_text("")
    assert hashes(copy)["environment"] != before["environment"]
    (copy / "f.py").write_text("")
    assert hashes(copy)["reward"] != before["reward"]


def test_the_hash_of_a_run_with_one_environment_is_what_it_was() -> None:
    run = RunSettings(model="init", environment="calculator", eval_samples=0)

    assert settings_hash(run) == SETTINGS_HASH


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{share: 2}", "environments.0.environment must be text, got nothing"),
        ("{environment: dataset, shar: 2}", "environments.0.shar .* did you mean share?"),
        (
            "{environment: dataset, colour: 2}",
            "environments.0.colour .* its keys are name, .*share",
        ),
        ("{environment: dataset, share: no}", "environments.0.share must be a number >= 0"),
        ("{environment: dataset, reward: 5}", "environments.0.reward must be text or "),
        ("5", r"environments.0 must be a table"),
    ],
)
def test_a_mistake_in_one_of_several_environments_is_named(
    tmp_path: Path, entry: str, said: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"run:\n  name: x\n  model: init\n  environments:\n    - {entry}\n")

    with pytest.raises(SettingsError, match=said):
        load(file)
