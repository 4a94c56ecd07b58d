"""Forty mistakes of a first hour: the sentence that each gets, and what to do about it.

Each begins in a new project (`nyala new mine`, in its folder). A change is of a file: text, or
`(old, new)` to replace in it. The remedy is what the sentence asks for, as changes or as another
command.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Changes = Mapping[str, "str | tuple[str, str]"]
NONE: Changes = MappingProxyType({})

CHECK = "nyala up mine.yaml --dry-run"
SETTINGS = "mine.yaml"
REWARD = "rewards.py:in_place"
GUESS = ("environment: dataset", "environment: env.py:GuessingGame")
ROWS_OF_ENVIRONMENT = """environment: dataset        # rows of data.jsonl. For a game or a tool of \
several turns: env.py:GuessingGame
  environment_settings: {path: data.jsonl, prompt: question, answer: answer, scorer: exact, \
answer_format: ""}
                              # scorer: numeric for numbers, math-verify for mathematics (pip \
install 'nyala[math]')
  reward: rewards.py:in_place """
OWN_ENVIRONMENT = """environment: env.py:Mine
  #"""


class Mistake(NamedTuple):
    """One mistake."""

    name: str
    says: str
    """A part of the sentence."""
    change: Changes = NONE
    command: str = CHECK
    remedy: Changes = NONE
    """Changes that put it right; none = the mistake is in the command."""
    instead: str = CHECK
    """The command that works then."""


def setting(old: str, new: str, **more: str) -> Changes:
    return {SETTINGS: (old, new), **more}


def reward(text: str) -> Changes:
    return {"rewards.py": text}


def environment(text: str) -> Changes:
    """An environment of one's own in place of the dataset."""
    return {
        "env.py": text,
        SETTINGS: (ROWS_OF_ENVIRONMENT, OWN_ENVIRONMENT),
    }


ONE_TURN = """
from actors.environments.base import Score, Step

class Item:
    prompt, answer, demonstration = "1+1=", "2", ()
    def step(self, text):
        return Step()
    def score(self):
        return Score(1.0)

class Mine:
    def begin(self, index, seed, *, held_out):
        return Item()
    def describe(self):
        return "mine"
"""
GYM = """
import random

class Mine:
    def reset(self, seed=None):
        return f"{random.Random(seed).random():.3f}"
    def step(self, action):
        return "", 1.0, True, False, {}
"""
TOOLS = '''
class Mine:
    def reset(self, **row) -> str:
        return "1+1="
    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)
    def get_reward(self) -> float:
        return 1.0
'''
IN_PLACE = "def in_place(completion, answer):\n    return float(completion == answer)\n"
ROW = '{"question": "1+1=", "answer": "2"}\n'
ROWS = "".join(ROW.replace("1+1", f"{n}+1").replace('"2"', f'"{n + 1}"') for n in range(60))

COMMANDS = [
    Mistake("no file", "give one settings file or run folder", command="nyala up"),
    Mistake(
        "a verb that is none",
        "Did you mean 'status'",
        command="nyala statsu",
        instead="nyala status --help",
    ),
    Mistake(
        "a file that is not there",
        "nosuch.yaml must be a YAML file",
        command="nyala up nosuch.yaml --dry-run",
    ),
    Mistake(
        "Hydra's way to set",
        "write --set learner.lr=1e-4",
        command=f"{CHECK} learner.lr=1e-4",
        instead=f"{CHECK} --set learner.lr=1e-4",
    ),
    Mistake(
        "a setting as a flag",
        "write --set learner.lr=1e-4",
        command=f"{CHECK} --learning_rate 1e-4",
        instead=f"{CHECK} --set learner.lr=1e-4",
    ),
    Mistake(
        "--set without a value",
        "write --set learner.lr=1e-4",
        command=f"{CHECK} --set learner.lr",
        instead=f"{CHECK} --set learner.lr=1e-4",
    ),
    Mistake(
        "a method that is none",
        "GRPO",
        command=f"{CHECK} --method GRP0",
        instead=f"{CHECK} --method GRPO",
    ),
    Mistake(
        "status of no run",
        "start a run with `nyala up`",
        command="nyala status runs/mine",
        instead=CHECK,
    ),
    Mistake(
        "an actor for no run", "must be a YAML file", command="nyala actor runs/mine", instead=CHECK
    ),
    Mistake(
        "a project that is there",
        "must be a new folder",
        command="nyala new mine",
        change={"mine/env.py": ""},
        instead="nyala new other",
    ),
    Mistake(
        "a project with a name in words",
        "small letters, digits, - and _",
        command="nyala new 'My Project'",
        instead="nyala new my-project",
    ),
    Mistake(
        "a model that is not made",
        "--policy script --policy echo",
        command="nyala env test mine.yaml",
        instead="nyala env test mine.yaml --policy script --policy echo -n 1",
    ),
    Mistake(
        "a password on the command line",
        "put the URL into the variable NYALA_REDIS_URL",
        command=f"{CHECK} --set buffer.url=redis://:secret@127.0.0.1:1/0",
    ),
    Mistake(
        "a folder that cannot be written",
        "for a run: --set run.directory=FOLDER",
        command="nyala up mine.yaml --set run.directory=data.jsonl",
        instead=f"{CHECK} --set run.directory=elsewhere",
    ),
    Mistake(
        "data check of what is no file",
        "only rows of a file can be counted",
        command="nyala data check mine.yaml --set run.environment=calculator",
        instead="nyala data check mine.yaml",
    ),
]

IN_SETTINGS = [
    Mistake(
        "a misspelt setting",
        "did you mean learner.lr",
        setting("  lr: 4e-4", "  l_r: 4e-4"),
        remedy=setting("  l_r: 4e-4", "  lr: 4e-4"),
    ),
    Mistake(
        "a wrong type",
        "run.steps must be a whole number",
        setting("steps: 60 ", "steps: many "),
        remedy=setting("steps: many", "steps: 60"),
    ),
    Mistake(
        "out of range",
        "learner.lr must be a number > 0",
        setting("lr: 4e-4", "lr: -4e-4"),
        remedy=setting("lr: -4e-4", "lr: 4e-4"),
    ),
    Mistake(
        "TRL's name",
        "did you mean run.group_size",
        setting("group_size: 16", "num_generations: 16"),
        remedy=setting("num_generations: 16", "group_size: 16"),
    ),
    Mistake(
        "verl's name",
        "did you mean learner.lr",
        command=f"{CHECK} --set actor_rollout_ref.actor.optim.lr=1e-4",
        instead=f"{CHECK} --set learner.lr=1e-4",
    ),
    Mistake(
        "no YAML",
        "mine.yaml must be a YAML file, got: expected",
        setting("  name: mine", "  name: [mine"),
        remedy=setting("  name: [mine", "  name: mine"),
    ),
    Mistake(
        "an engine that is none",
        "must be one of vllm, torch",
        setting("engine: torch", "engine: hf"),
        remedy=setting("engine: hf", "engine: torch"),
    ),
    Mistake(
        "a name with a space",
        "letters, digits",
        setting("name: mine", "name: my run"),
        remedy=setting("name: my run", "name: my-run"),
    ),
    Mistake(
        "a port in use",
        "tcp://127.0.0.1:0 takes any free one",
        setting("tcp://127.0.0.1:0", "tcp://127.0.0.1:{port}"),
        remedy=setting("tcp://127.0.0.1:{port}", "tcp://127.0.0.1:0"),
    ),
    Mistake(
        "prompts longer than allowed",
        "run.max_prompt_tokens must be enough",
        setting("max_prompt_tokens: 16", "max_prompt_tokens: 3"),
        remedy=setting("max_prompt_tokens: 3", "max_prompt_tokens: 32"),
    ),
    Mistake(
        "a model folder that is not there",
        "which does not exist",
        setting("model: init ", "model: ./model "),
        remedy=setting("model: ./model ", "model: init "),
    ),
    Mistake(
        "a model without a tokenizer",
        "with the tokenizer's `save_pretrained`",
        setting(
            "model: init ",
            "model: ./model ",
            **{"model/config.json": "{tiny_config}", "model/model.safetensors": ""},
        ),
        remedy={"model": "{tiny_model}"},
    ),
]

IN_DATA = [
    Mistake(
        "a missing file",
        "must be a readable file, got rows.jsonl",
        setting("path: data.jsonl", "path: rows.jsonl"),
        remedy={"rows.jsonl": ROWS},
    ),
    Mistake(
        "a file of another kind",
        "must end with one of .jsonl",
        setting("path: data.jsonl", "path: data.txt"),
        remedy=setting("path: data.txt", "path: data.jsonl"),
    ),
    Mistake(
        "an empty file",
        "must have rows to train on, got none that is not held out among 0 ",
        {"data.jsonl": ""},
        remedy={"data.jsonl": ROWS},
    ),
    Mistake(
        "too few rows to hold any out",
        "must leave some held-out rows",
        {"data.jsonl": ROW},
        remedy=setting("eval_episodes: 100", "eval_episodes: 0"),
    ),
    Mistake(
        "a line that is no JSON",
        "data.jsonl must be JSON",
        {"data.jsonl": f"{ROW}{{'question': 1}}\n{ROWS}"},
        remedy={"data.jsonl": ROWS},
    ),
    Mistake(
        "a wrong column",
        "row 1 has question, answer",
        setting("prompt: question", "prompt: prompt"),
        remedy=setting("prompt: prompt", "prompt: question"),
    ),
    Mistake(
        "a missing answer",
        "data.jsonl must have an answer in answer, got none",
        {"data.jsonl": ROWS + '{"question": "9=", "answer": null}\n'},
        remedy={"data.jsonl": ROWS},
    ),
    Mistake(
        "an answer that the scorer cannot read",
        "data.jsonl must have a number, got 'nine'",
        setting(
            "scorer: exact",
            "scorer: numeric",
            **{"data.jsonl": ROWS + '{"question": "9=", "answer": "nine"}\n'},
        ),
        remedy={"data.jsonl": ROWS},
    ),
    Mistake(
        "a scorer that is none",
        "run.environment_settings.scorer must be",
        setting("scorer: exact", "scorer: f1"),
        remedy=setting("scorer: f1", "scorer: exact"),
    ),
    Mistake(
        "messages for a character model",
        "must be a chat model for messages",
        {
            "data.jsonl": ROWS.replace(': "', ': [{"role": "user", "content": "', 0)
            .replace('"question": ', '"question": [{"role": "user", "content": ')
            .replace('=", ', '="}], ')
        },
        remedy={"data.jsonl": ROWS},
    ),
]

IN_CODE = [
    Mistake(
        "a reward that is not there",
        "there is no",
        setting(REWARD, "reward.py:in_place"),
        remedy=setting("reward.py:in_place", REWARD),
    ),
    Mistake(
        "a function that is not there",
        "it has in_place",
        setting(REWARD, "rewards.py:far"),
        remedy=setting("rewards.py:far", REWARD),
    ),
    Mistake(
        "a syntax error",
        "SyntaxError",
        reward("def in_place(completion, answer)\n"),
        remedy=reward(IN_PLACE),
    ),
    Mistake(
        "a reward in words",
        "must be a float, got 'good'",
        reward("def in_place(completion, answer):\n    return 'good'\n"),
        remedy=reward(IN_PLACE),
    ),
    Mistake(
        "a reward that fails",
        "ZeroDivisionError",
        reward("def in_place(completion, answer):\n    return 1 / 0\n"),
        remedy=reward(IN_PLACE),
    ),
    Mistake(
        "a column that is not there",
        "got 'solution'; rename it, give it a default, or add a column of that name",
        reward("def in_place(completions, solution, **kwargs):\n    return [0.0] * 2\n"),
        remedy={
            "data.jsonl": ROWS.replace('"answer"', '"solution"'),
            SETTINGS: ("answer: answer, scorer: exact, ", ""),
        },
    ),
    Mistake(
        "too few rewards",
        "a list of 2 floats, one for each completion",
        reward("def in_place(completions, **kwargs):\n    return [1.0]\n"),
        remedy=reward(
            "def in_place(completions, **kwargs):\n    return [1.0] * len(completions)\n"
        ),
    ),
    Mistake(
        "a reward of no known form",
        "with (a, b); give it the parameters",
        reward("def in_place(a, b):\n    return 1.0\n"),
        remedy=reward(IN_PLACE),
    ),
    Mistake(
        "an item without step",
        "without step; add what is missing",
        environment(ONE_TURN.replace("def step", "def answer_to")),
        remedy={"env.py": ONE_TURN},
    ),
    Mistake(
        "a begin that fails",
        "KeyError",
        environment(ONE_TURN.replace("return Item()", "return {}[index]")),
        remedy={"env.py": ONE_TURN},
    ),
    Mistake(
        "a class without the methods",
        "must be a class with begin and describe",
        environment("class Mine:\n    pass\n"),
        remedy={"env.py": ONE_TURN},
    ),
    Mistake(
        "a keyword that the class lacks",
        "must be keywords of",
        environment(ONE_TURN),
        command=f"{CHECK} --set 'run.environment_settings={{level: 3}}'",
        instead=CHECK,
    ),
    Mistake(
        "a reset that goes its own way",
        "must begin the same item with the same prompt",
        environment(GYM.replace("Random(seed)", "SystemRandom()")),
        remedy={"env.py": GYM},
    ),
    Mistake(
        "an observation that is no text",
        "must be a text, got int from reset",
        environment(GYM.replace('f"{random.Random(seed).random():.3f}"', "7")),
        remedy={"env.py": GYM},
    ),
    Mistake(
        "tools for a character model",
        "must be a chat model for tools",
        environment(TOOLS),
        remedy={"env.py": GYM},
    ),
    Mistake(
        "a tool without type hints",
        "type hints and a docstring",
        environment(TOOLS.replace("a: int", "a")),
        remedy={"env.py": GYM},
    ),
]

MISTAKES = [*COMMANDS, *IN_SETTINGS, *IN_DATA, *IN_CODE]
