"""Checks of a run's model and learning rate, and of the engine, memory and disk that it needs.

The first line of a check says what holds if it returns. It returns figures for `nyala doctor`. A
model on the Hugging Face hub is asked for its `config.json`, which takes 10 s at most where the hub
is away. A check of it raises `SettingsError` if there is none.
"""

from __future__ import annotations

import json
import queue
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

from actors.engine.choice import choose_engine, episodes_at_a_time, usable_engine
from actors.engine.engine_args import CPU_KV_CACHE_GIB, check_engine_args
from actors.engine.tokenizer import ModelTokenizer
from broker.weights.shared_memory import HEADROOM, SCRATCH, SHARED_MEMORY, scratch
from configs.architecture import check_architecture, check_context
from configs.errors import SettingsError
from configs.machine import memory_of_machine, visible_gpus
from configs.settings import RunSettings, Settings
from configs.validation.learner import check_heads, layout_of
from console.run.card_memory import CardMemory, card_memory, saved_bytes, smallest_card
from console.run.decoder_sizes import ModelShape
from console.run.user_files import with_value
from learner.weights.memory import NUM_SLOTS

from .check import GIB, CheckWarning, sized

HUB_TIMEOUT_S = 10.0

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
MADE = "made by `nyala init-model` when the run begins"


def check_parallel(settings: Settings) -> str:
    """The learner's ranks, and the heads of the model, can be divided as the settings say.

    Raises:
        SettingsError: They cannot be divided so.
    """
    layout_of(settings.parallel, settings.learner.ranks)
    divides_heads = max(settings.parallel.sequence, settings.parallel.tensor) > 1
    if divides_heads and (config := model_config(settings.run)) is not None:
        check_heads(settings.parallel, config)
    return f"{settings.learner.ranks} rank(s)"


def check_engine(settings: Settings) -> str:
    """The engine of the actors can start here, and takes `actors.engine_args`.

    Raises:
        SettingsError: It cannot start, or does not take them.
    """
    actors, on_gpu = settings.actors, bool(visible_gpus())
    choose = usable_engine if actors.count else choose_engine
    choice = choose(settings, on_gpu=on_gpu)
    check_engine_args(actors.engine_args)
    return f"{choice.engine}: {choice.reason}" if actors.engine == "auto" else choice.engine


def small_engine_warning(settings: Settings) -> str | None:
    """Say that actors take the small engine because this machine lacks something for vLLM.

    None where they do not, and where vLLM was not wanted.
    """
    actors = settings.actors
    choice = choose_engine(settings, on_gpu=bool(visible_gpus()))
    if not actors.count or actors.engine != "auto" or not choice.is_substitute:
        return None
    return (
        f"actors sample with the small engine, slower for all but very small models: "
        f"{choice.reason}"
    )


def check_model(run: RunSettings) -> str:
    """There is a model to start from; `init` is made when the run begins.

    Raises:
        SettingsError: There is no model that can be trained.
    """
    model = run.model
    path = Path(model).expanduser()
    if model == "init":
        return MADE
    _refuse_other_files(path)
    tokens = run.max_prompt_tokens + run.max_completion_tokens
    if path.exists():
        _check_model_folder(path, tokens)
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise SettingsError(
            f"run.model must be a Hugging Face model directory, got {model}, which does not exist; "
            f"correct the path, or set `init`, which makes a small character model"
        )
    else:
        _check_config(_hub_config(model), tokens)
    ModelTokenizer.for_run(run)  # refuses a tokenizer that no actor could load
    return model


def check_lengths(settings: Settings) -> str:
    """Prompt and completion fit the context of the model.

    Raises:
        SettingsError: They do not fit.
    """
    config = model_config(settings.run)
    return MADE if config is None else check_context(config, settings)


def check_template(run: RunSettings) -> str | CheckWarning:
    """The chat template begins the policy's turn, and ends it with what stops the policy.

    Raises:
        SettingsError: It does not.
    """
    if run.model == "init":
        return (
            "that of a character model" if run.has_agents else "a character model, which has none"
        )
    tokenizer = ModelTokenizer.for_run(run)
    frame = tokenizer.turn_frame()
    if frame is None and run.has_agents:
        return CheckWarning(
            "run.model should be a chat model for live agents, got one without a chat template, "
            "which answers calls with tokens alone (/inference/v1/generate); choose a chat model"
        )
    if frame is None:
        return "none: prompts are bare texts"
    checked = f"{frame.check_opening()}, {frame.check_closing(run.stop)}"
    try:
        if run.has_agents:
            tokenizer.check_tools()
    except SettingsError as error:
        return CheckWarning(f"{checked}; calls of agents with tools will be refused: {error}")
    return checked


def _refuse_other_files(path: Path) -> None:
    """Refuse model files in another format, and say how to convert them.

    Raises:
        SettingsError: The path is a file, GGUF or an adapter.
    """
    files = [file.name for file in path.iterdir()] if path.is_dir() else []
    has_weights = any(name.endswith(".safetensors") for name in files)
    names = files if path.is_dir() else [path.name]
    gguf = next((name for name in names if name.lower().endswith("gguf")), None)
    if gguf is not None and not has_weights:
        folder = str(path if path.is_dir() else path.parent)
        raise SettingsError(
            f"run.model must be a Hugging Face model directory, got {path}, which is GGUF; take "
            f"the model in its original form, or convert it (package gguf): "
            f"AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={gguf!r})"
            f".save_pretrained('model'), and the same with AutoTokenizer"
        )
    if path.is_file():
        raise SettingsError(
            f"run.model must be a Hugging Face model directory, got {path}, which is a file; name "
            f"the folder that it is in"
        )
    if "adapter_config.json" in files and "config.json" not in files:
        raise SettingsError(
            f"run.model must be a Hugging Face model directory, got {path}, which is an adapter; "
            f"merge it into its model first (package peft): "
            f"AutoPeftModelForCausalLM.from_pretrained({str(path)!r}).merge_and_unload()"
            f".save_pretrained('model'), with the tokenizer beside it"
        )


def _check_model_folder(path: Path, tokens: int) -> None:
    if not (path / "config.json").is_file():
        raise SettingsError(
            f"run.model must be a Hugging Face model directory, got {path} without a config.json; "
            "name the folder that has it, or download the model again"
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
            f"run.model must have a config.json that can be read, got {path}: {error}; let your "
            "user read it, or download the model again"
        ) from None
    if not isinstance(config, dict):
        raise SettingsError(
            f"run.model must have a JSON object as its config.json, got {path}; download the model "
            "again"
        )
    return config


def model_config(run: RunSettings) -> dict[str, Any] | None:
    """Read the configuration of the run's model; None if `init` is to make the model.

    Raises:
        SettingsError: There is no configuration, or it cannot be read.
    """
    if run.model == "init":
        return None
    path = Path(run.model).expanduser()
    return _read_config(path / "config.json" if path.exists() else _hub_config(run.model))


def _hub_config(model: str) -> Path:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - huggingface_hub

    kept, away = _kept_config(model), hub_is_away()
    if away and kept is not None:
        return kept
    if away:
        raise SettingsError(
            f"run.model must be a model directory, a name on the Hugging Face hub, or `init`, got "
            f"{model!r}: there is no such directory, and the hub cannot be reached: {away}; name "
            f"a directory, or check the network, a proxy and HF_ENDPOINT"
        )
    try:
        config = hf_hub_download(model, "config.json", etag_timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises, the model is not there
        first_line = str(error).strip().partition("\n")[0]
        raise SettingsError(
            "run.model must be a model directory, a name on the Hugging Face hub, or `init`, got "
            f"{model!r}: there is no such directory, and the hub says: {first_line}; correct the "
            "name, or log in to the hub with `hf auth login` if the model is not public"
        ) from None
    return Path(config)


def _kept_config(model: str) -> Path | None:
    """Return the path of a configuration in the hub's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - huggingface_hub

    try:
        path = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a valid name of a model on the hub
        return None
    return Path(path) if isinstance(path, str) else None


def hub_is_away() -> str:
    """Ask the hub once, for 10 s at most, and return why it is away; empty = it answers.

    A download would try again for a minute.
    """
    from huggingface_hub import constants, get_session  # noqa: PLC0415 - huggingface_hub

    faults: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever its client raises, the hub has not answered
            faults.put(f"{constants.ENDPOINT}: {str(error).partition(chr(10))[0] or error!r}")
        else:
            faults.put("")

    # The limit is for all addresses of the hub together: that of its client is for each address.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return faults.get(timeout=HUB_TIMEOUT_S)
    except queue.Empty:
        return f"{constants.ENDPOINT}: no answer within {HUB_TIMEOUT_S:g} s"


# --------------------------------------------------------------------------------------------------
# Check the learning rate against the model's size.

RATES = ((300e6, 1e-5), (3e9, 2e-6))
"""Learning rates of models of fewer parameters than this; larger ones have `LARGE_RATE`."""
LARGE_RATE = 1e-6
OF_ADAPTERS = 10.0
"""Factor between the rate of adapters and that of whole weights."""
FAR = 20.0
"""Factor above or below the usual rate that no tuning reaches."""
LEAST_PARAMETERS = 30e6
"""Smaller models are made for one task, and no rate is usual for them."""


def usual_rate(parameters: int, *, has_adapters: bool = False) -> float:
    """Return the usual first learning rate for tuning a pretrained model of this size."""
    rate = next((rate for most, rate in RATES if parameters < most), LARGE_RATE)
    return rate * OF_ADAPTERS if has_adapters else rate


def check_rate(settings: Settings) -> str | CheckWarning:
    """`learner.lr` is near the usual rate for the model's size."""
    lr, rank, config = settings.learner.lr, settings.learner.lora_rank, model_config(settings.run)
    if config is None:
        return "of a model that is made first"
    try:
        parameters = ModelShape.from_config(config).parameters
    except KeyError:  # an architecture that another check refuses
        return "of a model of unknown size"
    usual = usual_rate(parameters, has_adapters=rank > 0)
    what = "the adapters" if rank else "all weights"
    of = f"{what} of {parameters / 1e6:,.0f} million parameters"
    if parameters < LEAST_PARAMETERS or usual / FAR <= lr <= usual * FAR:
        return f"{lr:g} for {of}"
    return CheckWarning(
        f"learner.lr should be about {usual:g} for {of}, got {lr:g}, with which "
        + ("the model may collapse" if lr > usual else "nothing may be learned")
        + f"; set learner.lr: {usual:g}, and tune from there"
    )


def is_at_hand(run: RunSettings) -> bool:
    """Return whether the model of a run, or at least its `config.json`, is on this machine."""
    return Path(run.model).expanduser().exists() or _kept_config(run.model) is not None


# --------------------------------------------------------------------------------------------------
# Check memory and disk against the model: shared memory, cards, checkpoints.
#
# Sizes are computed from `config.json`, as in `card_memory.py`.

SMALL_BYTES = 64 * 2**20
"""A generous size for the character model that `init` makes."""
SPARE_DISK_BYTES = GIB
"""Disk space for logs, samples and metrics."""
LIBRARIES_BYTES = 4 * GIB // 5
"""Memory of torch and transformers in a rank of the learner: code and what they allocate."""
ENGINE_BYTES = GIB
"""Host memory of an actor on a card: torch, vLLM and their kernels."""
ENGINE_ON_CPU_BYTES = 9 * GIB // 10
"""Memory of an actor on a CPU besides weights, logits and KV cache, mostly of libraries."""
SERVICES_BYTES = 3 * GIB // 5
"""Memory of broker, a small store, `nyala up` and its fork server."""
COPIES_OF_LOGITS = 6
"""Copies of a step's logits in float32: themselves, their log-probs, and those of sampling."""


class Sizes(NamedTuple):
    """Bytes of a model and of its checkpoints."""

    published: int
    """Bytes of the weights that actors load."""
    checkpoint: int
    """Bytes of one checkpoint."""


def sizes_of(settings: Settings) -> Sizes:
    """Compute the sizes of a run's model.

    Raises:
        SettingsError: There is no such model, or its configuration names no sizes.
    """
    config = model_config(settings.run)
    if config is None:
        return Sizes(SMALL_BYTES, SMALL_BYTES)
    try:
        shape = ModelShape.from_config(config)
    except KeyError as error:
        raise SettingsError(
            f"run.model must have its sizes in config.json, got one without {error}; add it, so "
            f"that the memory of the run can be computed"
        ) from None
    itemsize = 2 if settings.run.dtype == "bfloat16" else 4
    return Sizes(itemsize * shape.parameters, saved_bytes(settings, shape))


def check_size(settings: Settings) -> str:
    """The size of the model is known, on which all other sizes depend.

    Raises:
        SettingsError: It is not known.
    """
    if settings.run.model == "init":
        return f"a character model, at most {sized(SMALL_BYTES)}"
    return f"{sized(sizes_of(settings).published)} as it is published"


def check_shared_memory(settings: Settings) -> str | CheckWarning:
    """The slots of published weights fit into shared memory, or else onto the disk.

    Raises:
        SettingsError: They fit into neither.
    """
    wanted = int(NUM_SLOTS * sizes_of(settings).published * HEADROOM)
    free = _free(SHARED_MEMORY)
    figures = f"{NUM_SLOTS} copies of the weights take {sized(wanted)}, {sized(free)} free"
    if wanted < free:
        return f"{figures} in {SHARED_MEMORY}"
    place = scratch(settings.run.folder)
    remedy = "enlarge it (docker: --shm-size, or --ipc=host; else `mount -o remount,size=...`)"
    if wanted > _free(place):
        raise SettingsError(
            f"{SHARED_MEMORY} must have {sized(wanted)} free for {NUM_SLOTS} copies of the "
            f"weights, got {sized(free)}, and {sized(_free(place))} on the disk of {place}; "
            f"{remedy}, or name a folder on a larger disk in the variable {SCRATCH}"
        )
    return CheckWarning(
        f"{SHARED_MEMORY} should have {sized(wanted)} free for {NUM_SLOTS} copies of the weights, "
        f"got {sized(free)}, so that they go to the disk of {place}, which is slower; {remedy}"
    )


def check_disk(settings: Settings) -> str | CheckWarning:
    """The checkpoints of a run fit onto its disk, together with its logs and its last model.

    Raises:
        SettingsError: They do not fit.
    """
    sizes, kept = sizes_of(settings), settings.learner.keep_checkpoints
    count = kept + 1 + settings.learner.keep_best  # one more while it is being written
    wanted = count * sizes.checkpoint + sizes.published
    held = sum(
        path.stat().st_size
        for path in (settings.run.folder / "checkpoints").rglob("*")
        if path.is_file()
    )
    free = _free(settings.run.folder)
    if wanted > free + held:
        raise SettingsError(
            f"the disk of run.directory must have {sized(wanted - held)} free for {count} "
            f"checkpoints of {sized(sizes.checkpoint)} and the model, got {sized(free)} at "
            f"{settings.run.folder}; free some space, lower learner.keep_checkpoints, or choose "
            f"another disk with --set run.directory=FOLDER"
        )
    if wanted + SPARE_DISK_BYTES > free + held:
        return CheckWarning(
            f"the disk of run.directory should have {sized(SPARE_DISK_BYTES)} left for logs and "
            f"samples, got {sized(free + held - wanted)} at {settings.run.folder} beside {count} "
            f"checkpoints of {sized(sizes.checkpoint)}; free some space, or choose another disk "
            f"with --set run.directory=FOLDER"
        )
    figures = f"{count} checkpoints of {sized(sizes.checkpoint)}, {sized(free)} free"
    return f"{figures}, {sized(held)} of them written" if held else figures


def learner_memory(settings: Settings, card_bytes: int | None) -> tuple[CardMemory, bool] | str:
    """Compute the memory of the learner on each card, and whether it trains on a card.

    Args:
        settings: Settings of the run.
        card_bytes: Memory of a card; None = there is no card.

    Returns:
        Memory and whether it trains on a card, or as text why the memory is not computed.
    """
    config = model_config(settings.run)
    if config is None:
        return "a character model"
    device = settings.learner.device
    on_gpu = device == "cuda" or (device == "auto" and card_bytes is not None)
    try:
        memory = card_memory(settings, config, on_gpu=on_gpu, card_bytes=card_bytes)
        return memory.with_teachers(settings, _configs_of_teachers(settings, config)), on_gpu
    except KeyError as error:
        return f"not computed, config.json has no {error}"


def _configs_of_teachers(settings: Settings, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the configurations of the teachers that the learner loads beside the run's model."""
    models = settings.algorithm.teachers if settings.algorithm.teacher_in == "learner" else ()
    if settings.learner.lora_rank:  # the initial model is there
        models = tuple(filter(None, models))
    runs = (with_value(settings, "run", "model", model).run if model else None for model in models)
    return [(model_config(run) if run else None) or config for run in runs]


def check_memory(settings: Settings) -> str:
    """The learner fits the smallest card, and all that runs here fits this machine's memory.

    Raises:
        SettingsError: They do not fit; the error names the setting that would help.
    """
    card = smallest_card()
    result = learner_memory(settings, card)
    if isinstance(result, str):
        return result
    memory, on_gpu = result
    texts = []
    if on_gpu and card is not None:
        memory.check_fit(card)
        texts.append(f"{sized(memory.total)} of {sized(card)} on each card")
    parts, here = machine_memory(settings, memory), memory_of_machine()
    wanted = sum(parts.values())
    if wanted > here:
        listed = ", ".join(f"{sized(size)} {name}" for name, size in parts.items())
        raise SettingsError(
            f"a run must fit the {sized(here)} of memory of this machine, got {sized(wanted)} "
            f"(computed: {listed}); {_way_out(settings, card, here)}"
        )
    return ", ".join([*texts, f"{sized(wanted)} of this machine's {sized(here)}, computed"])


def machine_memory(settings: Settings, learner: CardMemory) -> dict[str, int]:
    """Compute the memory of this machine that each part of a run takes.

    Args:
        settings: Settings of the run.
        learner: Memory of its learner on each card, or on the CPU.
    """
    config, sizes, actors = model_config(settings.run), sizes_of(settings), settings.actors
    assert config is not None, "a character model is small"
    rank_bytes = sum(learner.host.values()) if learner.on_gpu else learner.total
    parts = {
        "learner": learner.ranks * (rank_bytes + LIBRARIES_BYTES),
        "copy of a checkpoint": sizes.checkpoint,
        f"{NUM_SLOTS} copies of the weights in shared memory": NUM_SLOTS * sizes.published,
    }
    if actors.count:
        size, counted = ENGINE_BYTES, "libraries in host memory"
        if not visible_gpus():
            size = engine_on_cpu(settings, ModelShape.from_config(config), sizes.published)
            counted = "libraries, weights, KV cache, logits"
        parts[f"{actors.count} actor(s): {counted}"] = actors.count * size
    return parts | {"broker, store and console": SERVICES_BYTES}


def engine_on_cpu(settings: Settings, shape: ModelShape, published: int) -> int:
    """Return the bytes that an actor takes on a CPU besides the weights in shared memory.

    vLLM has the weights in use, those of the next version, and a third copy while a version is
    loaded. The first two also have a packed copy of tied embeddings as their output layer.
    """
    run, actors = settings.run, settings.actors
    episodes = episodes_at_a_time(settings, on_gpu=False)
    itemsize = published // shape.parameters
    fixed = ENGINE_ON_CPU_BYTES + COPIES_OF_LOGITS * 4 * episodes * shape.vocabulary
    if choose_engine(settings, on_gpu=False).engine == "vllm":
        packed = 2 * itemsize * shape.vocabulary * shape.width if shape.is_tied else 0
        return fixed + 3 * published + packed + (actors.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB
    length = actors.max_model_len or run.max_prompt_tokens + run.max_completion_tokens
    token = 2 * shape.layers * shape.kv_heads * shape.head_width * itemsize
    return fixed + 2 * published + episodes * length * token


def _way_out(settings: Settings, card: int | None, here: int) -> str:
    """Return the first change of settings with which a run fits this machine's memory."""
    run, learner = settings.run, settings.learner
    longest, tokens = run.max_prompt_tokens + run.max_completion_tokens, learner.microbatch_tokens
    changes: list[tuple[str, str, Any]] = []
    while (tokens := tokens // 2) >= longest:
        changes.append(("learner", "microbatch_tokens", tokens))
    changes += [
        ("learner", "activation_checkpointing", "full"),
        ("actors", "count", 1),
        ("run", "dtype", "bfloat16"),
        ("learner", "optimizer", "adamw8bit"),
        ("learner", "lora_rank", 16),
    ]
    for table, key, value in changes:
        changed = with_value(settings, table, key, value)
        result = learner_memory(changed, card)
        if isinstance(result, tuple) and sum(machine_memory(changed, result[0]).values()) <= here:
            return f"set {table}.{key} to {value}"
    return "choose a smaller model, or a machine with more memory"


def _free(place: Path) -> int:
    """Return the free bytes of the disk of a folder, which may not exist yet."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
