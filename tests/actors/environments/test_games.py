"""Environments of other projects that have `reset` and `step`, taken without a wrapper."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.demonstrations import export
from actors.environments.adapters.games import SharedGenerators
from actors.environments.base import Environment, columns_of
from actors.environments.registry import make_environment, try_environment
from configs.errors import SettingsError
from configs.settings import RunSettings, Settings

GYMNASIUM = '''
import random

class Guess:
    """As gymnasium's: a generator of its own, seeded by reset."""
    made = 0
    def __init__(self, highest=9):
        self.highest = highest
        Guess.made += 1
    def reset(self, *, seed=None, options=None):
        self.secret = random.Random(seed).randint(1, self.highest)
        self.turns = 0
        return f"1-{self.highest}?", {"secret": self.secret, "object": object()}
    def step(self, action):
        self.turns += 1
        won = action == str(self.secret)
        hint = "" if won else ("more" if int(action) < self.secret else "less")
        return hint, float(won), won, self.turns == 4, {"is_success": won}

class Shared(Guess):
    """As older ones: no seed, `random` itself, four values."""
    def reset(self):
        self.secret = random.randint(1, 10**9)
        return f"{self.secret}?"
    def step(self, action):
        return f"dice {random.randint(1, 10**9)}", 0.5, False, {}

class Unseeded(Guess):
    def reset(self):
        return f"{random.SystemRandom().random()}"

class Numbers(Guess):
    def reset(self, seed=None):
        return 7, {}

class Tools(Guess):
    def step(self, action):
        return "only a text"

class Nothing:
    pass

class Arena:
    """As TextArena's: the observation repeats all that was said."""
    def __init__(self):
        self.said = []
    def reset(self, num_players, seed=None):
        assert num_players == 1
        random.seed(seed)
        self.secret = random.randint(1, 9)
        self.said.append("[GAME] guess")
    def get_observation(self):
        return 0, "\\n".join(self.said)
    def step(self, action):
        self.said += [f"[Player 0] {action}", "[GAME] no"]
        self.done = action == str(self.secret)
        return self.done, {}
    def close(self):
        return {0: 1}, {}

def made(highest):
    return Guess(highest)
'''


@pytest.fixture
def make(tmp_path: Path) -> Any:
    file = tmp_path / "env.py"
    file.write_text(GYMNASIUM)

    def environment(name: str, **settings: Any) -> Environment:
        return make_environment(settings_of(f"{file}:{name}", settings))

    return environment


def settings_of(name: str, settings: dict[str, Any]) -> RunSettings:
    return RunSettings(model="init", environment=name, environment_settings=settings)


def test_a_gymnasium_class_is_played_as_it_is(make):
    environment = make("Guess", highest=7)
    conversation = environment.begin(3, 0, held_out=False)
    secret = columns_of(conversation)["secret"]

    assert conversation.prompt == "1-7?"
    assert columns_of(conversation) == {"secret": secret}
    wrong = next(number for number in range(1, 8) if number != secret)
    step = conversation.step(str(wrong))
    assert (step.observation, step.done) == ("more" if wrong < secret else "less", False)
    assert conversation.step(str(secret)).done
    score = conversation.score()
    assert (score.reward, score.parts) == (1.0, {"exact": 1.0})


def test_a_function_may_make_it(make):
    assert make("made", highest=3).begin(0, 0, held_out=False).prompt == "1-3?"


def test_an_item_is_the_same_for_all_of_a_group_and_another_where_it_is_held_out(make):
    environment = make("Guess", highest=10**9)

    def secrets(*, held_out, seed):
        items = (environment.begin(i, seed, held_out=held_out) for i in range(5))
        return [columns_of(item)["secret"] for item in items]

    assert secrets(held_out=False, seed=0) == secrets(held_out=False, seed=1)
    assert not {*secrets(held_out=False, seed=0)} & {*secrets(held_out=True, seed=0)}
    assert len({*secrets(held_out=False, seed=0)}) == 5


def test_each_episode_under_way_has_an_instance_and_ended_ones_leave_theirs(make):
    environment = make("Guess", highest=10**9)
    first, second = (environment.begin(i, 0, held_out=False) for i in (0, 1))
    secrets = [columns_of(each)["secret"] for each in (first, second)]

    assert second.step(str(secrets[1])).done
    assert first.step(str(secrets[0])).done
    second.score()
    third = environment.begin(2, 0, held_out=False)
    assert columns_of(third)["secret"] not in secrets
    assert third._game is second._game


def test_what_draws_from_the_shared_generators_is_repeated_whatever_others_draw(make):
    environment = make("Shared")

    def play(disturb):
        conversation = environment.begin(4, 0, held_out=False)
        said = [conversation.prompt]
        for _ in range(3):
            disturb()
            said.append(conversation.step("x").observation)
        return said, conversation.score().reward

    quiet = play(lambda: None)
    state = random.getstate()
    disturbed = play(lambda: (random.random(), environment.begin(9, 0, held_out=False)))

    assert disturbed == quiet
    assert quiet[1] == 1.5
    random.setstate(state)
    after = random.random()
    random.setstate(state)
    environment.begin(4, 0, held_out=False)
    assert random.random() == after  # ours go on as if nothing had been drawn


def test_an_episode_that_draws_nothing_at_first_waits_for_no_other():
    silent, drawing = SharedGenerators(1), SharedGenerators(1)
    with silent.kept():
        pass
    with drawing.kept():
        random.random()
    inside = threading.Event()

    def step():
        with silent.kept():
            inside.set()

    with drawing.kept():
        thread = threading.Thread(target=step)
        thread.start()
        assert inside.wait(30)
    thread.join(30)


def test_a_textarena_game_says_only_what_is_new(make):
    environment = make("Arena")
    conversation = environment.begin(0, 0, held_out=False)

    assert conversation.prompt == "[GAME] guess"
    assert conversation.step("0").observation == "\n[Player 0] 0\n[GAME] no"
    guesses = [conversation.step(str(number)) for number in range(1, 10)]
    assert any(guess.done for guess in guesses)
    assert conversation.score().reward == 1.0
    assert environment.begin(1, 0, held_out=False).prompt == "[GAME] guess"


def test_a_model_without_a_supervised_start_needs_no_right_answers(tmp_path):
    (tmp_path / "env.py").write_text(GYMNASIUM)
    settings = Settings(run=settings_of(f"{tmp_path}/env.py:Guess", {}))

    assert export(settings, tmp_path / "out", count=3, makes_tokenizer=True).rows == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer"]
    learner = settings.learner.model_copy(update={"warm_start_steps": 1})
    with pytest.raises(SettingsError, match=r"set learner.warm_start_steps to 0"):
        export(
            settings.model_copy(update={"learner": learner}),
            tmp_path / "others",
            count=3,
            makes_tokenizer=True,
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Unseeded", "must begin the same item with the same prompt"),
        ("Numbers", "an observation must be a text, got int from reset"),
        ("Nothing", "must be a class with begin and describe, or reset and step"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_a_run(tmp_path, name, words):
    file = tmp_path / "env.py"
    file.write_text(GYMNASIUM)

    with pytest.raises(SettingsError, match=words):
        try_environment(settings_of(f"{file}:{name}", {}))


def test_a_step_of_another_form_is_named(make):
    conversation = make("Tools").begin(0, 0, held_out=False)

    with pytest.raises(SettingsError, match=r"step must return .*got 'only a text'.*factory"):
        conversation.step("7")
