"""Check the model that a run starts from: files, architecture, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.engine.choice import choose_engine, usable_engine
from actors.engine.engine_args import check_engine_args
from actors.engine.tokenizer import ModelTokenizer
from configs.architecture import check_architecture
from configs.errors import SettingsError
from configs.machine.gpus import visible_gpus
from configs.settings import RunSettings, Settings
from configs.validation.parallel import check_heads, layout_of

HUB_TIMEOUT_S = 10.0

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
MADE = "made by `nyala init-model` when the run begins"


def check_parallel(settings: Settings) -> str:
    """The learner's ranks, and the heads of the model, can be divided as the settings say.

    Raises:
        SettingsError: They cannot.
    """
    layout_of(settings.parallel, settings.learner.ranks)
    divides_heads = max(settings.parallel.sequence, settings.parallel.tensor) > 1
    if divides_heads and (config := model_config(settings.run)) is not None:
        check_heads(settings.parallel, config)
    return f"{settings.learner.ranks} rank(s)"


def check_engine(settings: Settings) -> str:
    """The engine of the actors can start here, and may be given its further arguments.

    Raises:
        SettingsError: It cannot.
    """
    actors, on_gpu = settings.actors, bool(visible_gpus())
    choose = usable_engine if actors.count else choose_engine
    choice = choose(settings, on_gpu=on_gpu)
    check_engine_args(actors.engine_args)
    return f"{choice.engine}: {choice.reason}" if actors.engine == "auto" else choice.engine


def small_engine_warning(settings: Settings) -> str | None:
    """Say that actors take the small engine because this machine lacks something for vLLM."""
    actors = settings.actors
    choice = choose_engine(settings, on_gpu=bool(visible_gpus()))
    if not actors.count or actors.engine != "auto" or choice.engine == "vllm":
        return None
    return (
        f"actors sample with the small engine, slower for all but very small models: "
        f"{choice.reason}"
    )


def check_model(run: RunSettings) -> str:
    """There is a model to start from; `init` is made on the way.

    Raises:
        SettingsError: There is none that can be trained.
    """
    model = run.model
    path = Path(model).expanduser()
    if model == "init":
        return MADE
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
    return model


def check_template(run: RunSettings) -> str:
    """The chat template begins the policy's turn, and ends it with what stops the policy.

    Raises:
        SettingsError: It does not.
    """
    if run.model == "init":
        return "a character model, which has none"
    tokenizer = ModelTokenizer.of(run)
    frame = tokenizer.turn_frame()
    if frame is None:
        return "none: prompts are bare texts"
    return f"{frame.check_opening()}, {frame.check_closing(run.stop)}"


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
