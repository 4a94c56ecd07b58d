"""Beginnings of a run: `nyala new` makes a project's folder, `nyala init-model` a model."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from actors.chat import column_at, read_prompt
from actors.environments.dataset.rows import open_rows
from actors.environments.registry import make_dataset, make_environment
from actors.episodes.maker import EpisodeMaker
from actors.episodes.play import play_model
from actors.numbers import stated_number
from configs.errors import NyalaError, SettingsError
from configs.logging import quiet_libraries
from configs.machine import visible_gpus
from configs.settings import ActorSettings, LearnerSettings, RunSettings, Settings
from console.command_line import Config, ConfigOption, Overrides, one_of
from console.display.display import print_line
from console.run.checks.model import check_memory, check_model, model_config, usual_rate
from console.run.decoder_sizes import ModelShape
from console.run.init_model import make_if_needed
from console.run.run_folder import settings_of
from console.run.user_files import resolve
from learner.data.curriculum import training_task

from .data import token_counter
from .env import own_stdout, started_model

TEMPLATES = Path(__file__).parents[1] / "new_project"
FILES = {
    "rewards.py": "rewards.py",
    "env.py": "env.py",
    "project_test.txt": "test_PROJECT.py",
    "pytest.ini": "pytest.ini",  # in a checkout of ours, whose settings want plugins
}
ROWS = 1000  # of data.jsonl, for a model that is made
PROBLEMS = 656  # of data.jsonl, for a model that is named
TOKEN_STEP = 32  # limits of tokens are multiples of it
LEAST_ANSWER = 64  # tokens: room to reason a little
MOST_EVALUATED = 64  # held-out questions
QUESTIONS = ("question", "prompt", "problem", "input", "instruction", "messages")
ANSWERS = (
    "answer",
    "ground_truth",
    "reward_model.ground_truth",  # of verl
    "final_answer",
    "solution",
    "output",
    "target",
)
HELD_OUT = "held-out questions in each"
NONE_HELD_OUT = "no row is held out: add more, or name a file of them, held_out: FILE, above"
MICROBATCHES = (16384, 8192, 4096, 2048)  # tokens, until one fits
TEMPERATURES = (1.0, 0.8, 0.6)  # the first at which a model answers nearly as well as greedily
NEARLY = 0.5  # of the greedy score
LOOKED_AT = 48  # questions, at each temperature and greedily
LOOK_S = 300.0
MOST_LOOKED_AT = 2e9  # parameters: a larger model samples well, and is slow to ask on a CPU
ON_A_SHARED_CARD = """
  gpu_memory_utilization: 0.3 # must be free when it starts, beside the learner
  kv_cache_gib: 4             # learner and actor share the card"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project, a new folder.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Directory or hub name of the model to train. Default: a small one is made.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Rows to train the model on: JSON lines, JSON, CSV or parquet. Default: sums in "
            "words.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a new folder: settings, a reward, an environment, data, a test.

    They work as they are: in that folder `nyala up NAME.yaml` trains a small model on two cores, or
    the one that `--model` names. Then change one after the other into your own.

    Example: `nyala new mine --model models/smollm2-135m --data questions.jsonl`
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,40}", name):
        raise SettingsError(
            f"the name of a project must be a small letter and then at most 40 small letters, "
            f"digits, - and _, got {name!r}; choose another"
        )
    folder = Path(name)
    if folder.exists():
        raise SettingsError(
            f"{folder.absolute()} must be a new folder, got one that exists; choose another name"
        )
    checked = None if model in {None, "init"} else _checked(str(model))
    if data is not None and checked is None:
        raise SettingsError(
            f"--data must come with the --model that is trained on it, got {data} with "
            f"{model or 'none'}; add --model FOLDER"
        )
    values = {} if checked is None else _values(checked, data)
    folder.mkdir()
    for template, target in FILES.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8").replace("PROJECT", name)
        (folder / target.replace("PROJECT", name)).write_text(text, encoding="utf-8")
    if data is None:
        text = reversals() if checked is None else problems(PROBLEMS)
        (folder / "data.jsonl").write_text(text, encoding="utf-8")
    template = "settings.yaml" if checked is None else "settings_of_model.yaml"
    text, placed = (TEMPLATES / template).read_text(encoding="utf-8"), values | {"PROJECT": name}
    text = re.sub("[A-Z_]{4,}", lambda word: placed.get(word[0], word[0]), text)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    say, rows = Console(), "data.jsonl, " * (data is None)
    print_line(say, f"{folder}/  {name}.yaml, rewards.py, env.py, {rows}test_{name}.py, pytest.ini")
    print_line(say, f"next:  nyala up {folder / name}.yaml --dry-run")


def reversals() -> str:
    """Write the rows of `data.jsonl`: numbers of three to five digits, and their reversals."""
    numbers = random.Random(0).sample(range(100, 100_000), ROWS)
    rows = ({"question": f"{n}>", "answer": str(n)[::-1]} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows)


PEOPLE = [
    "Ada",
    "Ben",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Grace",
    "Hugo",
    "Iris",
    "Jonas",
    "Kira",
]
GOODS = ["apples", "books", "buttons", "cards", "coins", "cups", "keys", "nuts", "pens", "stamps"]
STORIES: tuple[tuple[str, str], ...] = (
    ("{who} has {a} {goods} and gets {b} more. How many {goods} does {who} have now?", "a + b"),
    ("{who} had {sum} {goods} and gave {a} to {other}. How many {goods} are left?", "b"),
    ("{a} boxes hold {b} {goods} each. How many {goods} do they hold in all?", "a * b"),
    ("{who} divides {product} {goods} equally among {a} bags. How many are in each bag?", "b"),
    ("{who} has {a} {goods}, and {other} has {b} more. How many does {other} have?", "a + b"),
    ("{who} pays {a} dollars for each of {b} {goods}. How many dollars is that?", "a * b"),
    ("{who} lost {a} of {sum} {goods} and found {c}. How many {goods} are there now?", "b + c"),
    ("{who} has {a} {goods}, {other} has {b}. How many {goods} have they together?", "a + b"),
)


def problems(count: int) -> str:
    """Write rows for a model that knows language: sums of grade school, each in a sentence or two.

    The rows of `configs/smollm2.yaml` are the first 400, and the 256 behind them.
    """
    chance, rows = random.Random(0), dict[str, int]()
    while len(rows) < count:
        (who, other), goods = chance.sample(PEOPLE, 2), chance.choice(GOODS)
        a, b, c = (chance.randrange(2, 13) for _ in range(3))
        results = {"a + b": a + b, "a * b": a * b, "b": b, "b + c": b + c}
        story, formula = chance.choice(STORIES)
        numbers = {"a": a, "b": b, "c": c, "sum": a + b, "product": a * b}
        rows[story.format(who=who, other=other, goods=goods, **numbers)] = results[formula]
    pairs = ({"question": question, "answer": str(answer)} for question, answer in rows.items())
    return "".join(json.dumps(row) + "\n" for row in pairs)


def _checked(model: str) -> str:
    """Check a model that can be trained; return its whole path, or its name on the hub.

    Raises:
        SettingsError: The model cannot be trained.
    """
    path = Path(model).expanduser()
    model_path = str(path.resolve()) if path.exists() else model
    check_model(RunSettings(model=model_path, max_prompt_tokens=1, max_completion_tokens=1))
    return model_path


def _values(model: str, data: str | None) -> dict[str, str]:
    """Fit the settings to a model and to the rows of a file, or to the rows that are written."""
    if data is not None:
        columns = columns_of(Path(data).expanduser().resolve())
        return _fitted(model, columns) | {"COLUMNS": json.dumps(columns, ensure_ascii=False)}
    with TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        path.write_text(problems(PROBLEMS), encoding="utf-8")
        columns = columns_of(path)
        named = json.dumps(columns | {"path": path.name})
        return _fitted(model, columns) | {"COLUMNS": named}


def _fitted(model: str, columns: dict[str, Any]) -> dict[str, str]:
    """Fit the settings to a model, to the data's lengths in its tokens, and to this machine."""
    run = RunSettings(model=model, environment="dataset", environment_settings=columns)
    count, dataset = token_counter(run), make_dataset(run)
    rows = [row for row, _ in dataset.all_rows()]
    longest = max(count.prompt(read_prompt(row.prompt)) for row in rows)
    answer = max(count.answer(row.answer or "") for row in rows)
    config = model_config(run)
    assert config is not None, model
    parameters, cards = ModelShape.from_config(config).parameters, len(visible_gpus())
    held_out = dataset.counts[1]
    limits = {
        "max_prompt_tokens": _rounded(longest),
        "max_completion_tokens": max(LEAST_ANSWER, _rounded(2 * answer)),
        "dtype": "bfloat16" if cards else "float32",
        "groups_per_batch": 32 if cards else 8,
        "group_size": 16 if cards else 8,
    }
    actors = ActorSettings(engine="auto", kv_cache_gib=4 if cards == 1 else None)
    fitted = Settings(run=run.model_copy(update=limits), actors=actors)
    temperature, scores = first_look(fitted) if parameters < MOST_LOOKED_AT else (1.0, "")
    return {
        "MODEL": json.dumps(model),
        "DTYPE": str(limits["dtype"]),
        "TEMPERATURE": str(temperature),
        "SCORES": scores or "lower it where sampled answers are far worse than greedy ones",
        "MEMBERS": str(limits["group_size"]),
        "GROUPS": str(limits["groups_per_batch"]),
        "PROMPT_TOKENS": str(limits["max_prompt_tokens"]),
        "LONGEST": str(longest),
        "ANSWER_TOKENS": str(limits["max_completion_tokens"]),
        "EVALUATED": str(min(MOST_EVALUATED, held_out)),
        "HELD_OUT": HELD_OUT if held_out else NONE_HELD_OUT,
        "SHARED": ON_A_SHARED_CARD if cards == 1 else "",
        "MICROBATCH": str(_microbatch(fitted)),
        "BROADCAST": "false" if cards == 1 else "null",
        "RATE": f"{usual_rate(parameters):.0e}".replace("e-0", "e-"),
        "SIZE": f"{parameters / 1e6:,.0f}",
    }


def first_look(settings: Settings) -> tuple[float, str]:
    """Choose a temperature from the untrained model's answers, within `LOOK_S` (5 minutes).

    Prints what it does to stderr.

    Returns:
        The temperature, and the scores at each as a text. If the model cannot answer, or not in
        time: 1.0 and an empty text.
    """
    say = Console(stderr=True)
    say.print(
        f"asking the model {LOOKED_AT} questions {1 + len(TEMPERATURES)} times, for a temperature; "
        f"on a CPU that may take minutes, {LOOK_S / 60:.0f} at most",
        style="dim",
    )
    quiet_libraries()
    small = settings.actors.model_copy(update={"engine": "torch"})
    try:
        with own_stdout():
            scores = asyncio.run(scores_at(settings.model_copy(update={"actors": small}), say))
    except (NyalaError, TimeoutError) as error:
        why = str(error) or f"they took longer than {LOOK_S:.0f} s"
        say.print(f"run.temperature stays {TEMPERATURES[0]}: {why}", style="yellow")
        return TEMPERATURES[0], ""
    greedy = scores.pop(0.0)
    good = [temperature for temperature, score in scores.items() if score >= NEARLY * greedy]
    told = ", ".join(f"{score:.2f} at {temperature}" for temperature, score in scores.items())
    return (good or TEMPERATURES[-1:])[0], f"untrained: greedy {greedy:.2f}, sampled {told}"


async def scores_at(settings: Settings, say: Console) -> dict[float, float]:
    """Return temperature -> mean score of answers, and print each; 0 = greedy.

    Raises:
        NyalaError: The model or the environment cannot be started.
        TimeoutError: It took longer than `LOOK_S`.
    """
    run, limit_s = settings.run, settings.actors.environment_timeout_s
    environment = make_environment(run)
    tasks = [training_task(run, number * run.group_size) for number in range(LOOKED_AT)]
    async with asyncio.timeout(LOOK_S), started_model(settings) as model:
        maker = EpisodeMaker(model.tokenizer, run, "look", limit_s=limit_s)
        scores = dict[float, float]()
        for temperature in (0.0, *TEMPERATURES):
            specs = [msgspec.structs.replace(task, temperature=temperature) for task in tasks]
            played = await play_model(model.engine, model.tokenizer, maker, environment, specs)
            scores[temperature] = fmean(one.score.reward for one in played)
            say.print(f"  at {temperature:g}: score {scores[temperature]:.2f}", style="dim")
    return scores


def _rounded(tokens: int) -> int:
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP


def columns_of(path: Path) -> dict[str, Any]:
    """Find the columns of questions and answers, and the scorer that compares answers.

    Raises:
        SettingsError: The rows cannot be read, or have no such columns.
    """
    rows = open_rows(str(path))
    first = next(iter(rows), {})
    asked, told = (
        next((name for name in names if _has_column(first, name)), None)
        for names in (QUESTIONS, ANSWERS)
    )
    if asked is None or told is None:
        missing, names = ("question", QUESTIONS) if asked is None else ("answer", ANSWERS)
        raise SettingsError(
            f"--data must have a column of each {missing}, one of {', '.join(names)}, got "
            f"{', '.join(first) or 'no rows'} in {path}; give the rows such a column"
        )
    numbers = all(stated_number(str(column_at(row, told))) is not None for row in rows)
    scorer = "numeric" if numbers else "exact"
    return {"path": str(path), "prompt": asked, "answer": told, "scorer": scorer}


def _has_column(row: Mapping[str, Any], name: str) -> bool:
    try:
        column_at(row, name)
    except KeyError:
        return False
    return True


def _microbatch(settings: Settings) -> int:
    """Return the most tokens of a microbatch with which the run fits the card and the machine."""
    for tokens in MICROBATCHES:
        try:
            check_memory(
                settings.model_copy(update={"learner": LearnerSettings(microbatch_tokens=tokens)})
            )
        except SettingsError:
            continue
        return tokens
    return MICROBATCHES[-1]  # `--dry-run` says what else would help


@app.command("init-model")
def init_model(
    config: Config = None, config_option: ConfigOption = None, overrides: Overrides = None
) -> None:
    """Make the model that a run begins with.

    A small character model, for settings with `run.model: init`; `nyala up` does it by itself. It
    is kept in the run's folder and made again only if settings that it depends on have changed.

    Example: `nyala init-model configs/demo.yaml --set learner.warm_start_steps=30`
    """
    settings = resolve(settings_of(one_of(config, config_option), overrides or []))
    if settings.run.model != "init":
        print(f"run.model is {settings.run.model}: nothing is to be made")
        return
    target = settings.run.folder / "init"
    if not make_if_needed(settings, target, Console()):
        print(f"{target} is already what these settings make")
