"""Checks of `nyala up` before it starts anything: each raises one sentence, or passes.

Owns the list of checks; each asks the room concerned. Nothing is changed here: no folder, no key in
Redis, no process that stays.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from actors.chat import read_prompt
from actors.engine.engine_args import check_engine_args
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.base import Conversation, tools_of
from actors.environments.registry import check_environment, example_parts, for_each, naming
from actors.rewards.pool import check_reward as try_reward
from broker.transport.keys import SERVERS, load_pair
from buffer.client.address import SCHEMES
from buffer.store import Store
from configs.architecture import check_architecture
from configs.errors import NyalaError, SettingsError
from configs.settings import (
    ActorSettings,
    BrokerSettings,
    LearnerSettings,
    RunSettings,
    Settings,
)
from configs.validation.parallel import check_heads, layout_of

from .checks.devices import check_devices
from .redis_server import find_binary, is_free

HUB_TIMEOUT_S = 10.0
REWARD_TIMEOUT_S = 60.0

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def refuse_what_cannot_run(settings: Settings, *, redis_url: str | None) -> None:
    """Do all checks and report all that fail.

    Args:
        settings: Of the run.
        redis_url: The server to use; None = one is started.

    Raises:
        SettingsError: At least one check failed.
    """
    problems = []
    checks: list[Callable[[], None]] = [
        lambda: check_endpoint(settings.broker),
        lambda: check_redis(settings.run, redis_url),
        lambda: check_keys(settings.broker),
        lambda: check_devices(settings.learner),
        lambda: check_parallel(settings),
        lambda: check_engine(settings.actors),
        lambda: check_model(settings.run),
        lambda: check_reward(settings),
    ]
    for check in checks:
        try:
            check()
        except NyalaError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError(_listed(problems))


def check_endpoint(broker: BrokerSettings) -> None:
    """The broker can listen at its endpoint."""
    endpoint = broker.endpoint
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or 0
    if host != "*" and port != 0 and not is_free(host, port):
        raise SettingsError(
            f"broker.endpoint must be an address that is free on this machine, got {endpoint}, "
            f"which is in use or not ours; stop the program that listens there, or choose another "
            f"port (tcp://127.0.0.1:0 takes any free one)"
        )


def check_redis(run: RunSettings, url: str | None) -> None:
    """The given Redis answers and takes our password, or a server can be started."""
    if url is None:
        find_binary()
        return
    if url.partition("://")[0] not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise SettingsError(
            f"buffer.url must begin with one of {schemes}, got {url.split('@')[-1]!r}"
        )
    try:
        with Store(url, run=run.name) as store:
            store.ping()
    except NyalaError as error:
        raise SettingsError(f"buffer.url must be a Redis server that lets us in: {error}") from None


def redis_warning(run: RunSettings, url: str) -> str | None:
    """Write what is known against the given Redis; it is used all the same."""
    with Store(url, run=run.name) as store:
        return store.server_warning()


def check_keys(broker: BrokerSettings) -> None:
    """Keys that were made elsewhere are complete."""
    if broker.keys is None:
        return
    for name in SERVERS:
        load_pair(broker.keys, name)


def check_parallel(settings: Settings) -> None:
    """The learner's ranks, and the heads of the model, can be divided as the settings say."""
    layout_of(settings.parallel, settings.learner.ranks)
    divides_heads = max(settings.parallel.sequence, settings.parallel.tensor) > 1
    if divides_heads and (config := model_config(settings.run)) is not None:
        check_heads(settings.parallel, config)


def check_engine(actors: ActorSettings) -> None:
    """The engine of the actors is installed, and may be given its further arguments."""
    if actors.count and actors.engine == "vllm":
        _require_package("vllm", "actors.engine", "torch")
    check_engine_args(actors.engine_args)


def check_model(run: RunSettings) -> None:
    """There is a model to start from; `init` is made on the way."""
    model = run.model
    path = Path(model).expanduser()
    if model == "init":
        return
    tokens = run.max_prompt_tokens + run.max_completion_tokens
    if path.exists():
        _check_model_folder(path, tokens)
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise SettingsError(
            f"run.model must be a Hugging Face model directory, got {model}, which does not exist; "
            f"`init` makes a small character model"
        )
    else:
        _check_config(_hub_config(model), tokens)
    ModelTokenizer.of(run)  # refuses what no actor could load


def check_reward(settings: Settings) -> None:
    """Each environment and its reward load, and score one sample; its prompt suits the model."""
    samples = for_each(settings.run, check_environment, limit_s=REWARD_TIMEOUT_S)
    for run, sample in zip(settings.run.by_environment.values(), samples, strict=True):
        with naming(run):
            try_reward(run, settings.actors, sample)
            _check_prompt(run, sample)
            _check_echo(settings.learner, run, sample)


def _check_prompt(run: RunSettings, sample: Conversation) -> None:
    """The prompt is short enough, and the model's template takes its messages and tools."""
    prompt, tools = read_prompt(sample.prompt), tools_of(sample)
    if run.model == "init":
        if tools or not isinstance(prompt, str):
            raise SettingsError(
                f"run.model must be a chat model for {'tools' if tools else 'messages'}, got init, "
                f"which makes a character model; choose a chat model, or give prompts as text"
            )
        length = len(prompt)  # one character is one token
    else:
        length = len(ModelTokenizer.of(run).encode_prompt(prompt, tools))
    if length > run.max_prompt_tokens:
        raise SettingsError(
            f"run.max_prompt_tokens must be enough for the prompts of {run.environment}, got "
            f"{run.max_prompt_tokens} for one of {length} tokens; raise it, or shorten the prompts"
        )


def _check_echo(learner: LearnerSettings, run: RunSettings, sample: Conversation) -> None:
    """A supervised start can repeat a question, and nothing that comes later."""
    turns = sum(turn.trained for turn in sample.demonstration)
    if run.model == "init" and learner.warm_start_echo and turns > 1:
        raise SettingsError(
            f"learner.warm_start_echo must be 0 for an environment of several turns, got "
            f"{learner.warm_start_echo:g} for {run.environment}; set it to 0"
        )


def weights_warning(settings: Settings) -> str | None:
    """Name the weights without a part in examples; it may appear in others, after a tool's use."""
    weights, run = settings.rewards.weights, settings.run
    if not weights:
        return None
    try:
        known = set().union(*for_each(run, example_parts, limit_s=REWARD_TIMEOUT_S))
    except NyalaError as error:
        return f"the names in rewards.weights were not checked: {error}"
    for alone in run.by_environment.values():
        known |= {*alone.reward_functions, *(["environment"] if alone.reward else [])}
    missing = [name for name in weights if name not in known]
    if not missing:
        return None
    return (
        f"rewards.weights must name parts of the reward, and examples have none of "
        f"{', '.join(missing)}, only {', '.join(sorted(known)) or 'none'}; a name that is never "
        f"seen weighs nothing"
    )


def _check_model_folder(path: Path, tokens: int) -> None:
    if not (path / "config.json").is_file():
        raise SettingsError(
            f"run.model must be a Hugging Face model directory, got {path} without a config.json"
        )
    if not any(path.glob("*.safetensors")):
        raise SettingsError(
            f"run.model must have its weights as .safetensors files, got none in {path}; "
            f"save it again with `save_pretrained`"
        )
    _check_config(path / "config.json", tokens)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise SettingsError(
            f"run.model must have a tokenizer beside its weights, got {path} without "
            f"{' or '.join(TOKENIZER_FILES)}; save it there with the tokenizer's `save_pretrained`"
        )


def _check_config(path: Path, tokens: int) -> None:
    check_architecture(_read_config(path), tokens=tokens)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"run.model must have a config.json that can be read, got {path}: {error}"
        ) from None
    if not isinstance(config, dict):
        raise SettingsError(f"run.model must have a JSON object as its config.json, got {path}")
    return config


def model_config(run: RunSettings) -> dict[str, Any] | None:
    """Read the configuration of the run's model; None where `init` is to make it.

    Raises:
        SettingsError: There is none.
    """
    if run.model == "init":
        return None
    path = Path(run.model).expanduser()
    return _read_config(path / "config.json" if path.exists() else _hub_config(run.model))


def _hub_config(model: str) -> Path:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - huggingface_hub

    try:
        config = hf_hub_download(model, "config.json", etag_timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises, the model is not there
        first_line = str(error).strip().partition("\n")[0]
        raise SettingsError(
            f"run.model must be a model directory, a name on the Hugging Face hub, or `init`, got "
            f"{model!r}: there is no such directory, and the hub says: {first_line}"
        ) from None
    return Path(config)


def _require_package(package: str, setting: str, instead: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SettingsError(
            f"{setting} must be an engine that is installed, got {package}, which is not; "
            f"install the profile cpu or cuda, or use {setting}={instead}"
        )


def _listed(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    lines = "".join(f"\n  {problem}" for problem in problems)
    return f"{len(problems)} things are in the way; nothing was started:{lines}"
