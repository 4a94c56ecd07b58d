"""Room for a model: shared memory, disk and memory that are too small for it."""

from __future__ import annotations

import io
import json
import shutil

import pytest
from rich.console import Console

from actors.engine.choice import EngineChoice
from broker.weights.shared_memory import SHARED_MEMORY
from configs import machine
from configs.errors import SettingsError
from configs.settings import Settings
from console.doctor.implied import settings_checks
from console.run import preflight
from console.run.card_memory import CardMemory, card_memory
from console.run.checks import model
from console.run.checks.check import GIB, CheckWarning
from console.run.decoder_sizes import ModelShape
from console.run.user_files import with_value
from console.verbs import up

QWEN3 = {  # of Qwen3-0.6B: 596,049,920 parameters
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
PARAMETERS = 596_049_920


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    run = {"model": str(tmp_path / "model"), "environment": "calculator", "directory": tmp_path}
    return Settings.model_validate({"run": run | {"dtype": "bfloat16"}})


def learner_alone(settings: Settings) -> CardMemory:
    """What the learner takes where there is no card."""
    computed = model.learner_memory(settings, None)
    assert not isinstance(computed, str), computed
    return computed[0]


@pytest.fixture
def free(monkeypatch):
    """Choose the free bytes of shared memory and of every disk."""
    usage = type(shutil.disk_usage("/"))

    def set_to(*, shared: int, disk: int) -> None:
        def look(place):
            found = shared if place == SHARED_MEMORY else disk
            return usage(1000 * GIB, 1000 * GIB - found, found)

        monkeypatch.setattr(shutil, "disk_usage", look)

    return set_to


def test_sizes_are_those_of_the_model(settings):
    assert model.sizes_of(settings) == (2 * PARAMETERS, 12 * PARAMETERS)


def test_three_copies_of_the_weights_must_fit_shared_memory_or_the_disk(settings, free):
    free(shared=4 * GIB, disk=100 * GIB)
    assert "3 copies of the weights take 3.7 GiB, 4.0 GiB" in model.check_shared_memory(settings)

    free(shared=64 * 2**20, disk=100 * GIB)
    found = model.check_shared_memory(settings)
    assert isinstance(found, CheckWarning)
    assert "should have 3.7 GiB free" in found.text
    assert "--shm-size" in found.text

    free(shared=64 * 2**20, disk=GIB)
    with pytest.raises(SettingsError, match=r"must have 3.7 GiB free .*got 64.0 MiB, and 1.0 GiB"):
        model.check_shared_memory(settings)


def test_checkpoints_must_fit_the_disk_beside_those_that_are_there(settings, free):
    wanted = (3 + 1) * 12 * PARAMETERS + 2 * PARAMETERS
    free(shared=0, disk=wanted + GIB)
    assert str(model.check_disk(settings)).startswith("4 checkpoints of 6.7 GiB")

    free(shared=0, disk=wanted)
    found = model.check_disk(settings)
    assert isinstance(found, CheckWarning)
    assert "should have 1.0 GiB left for logs and samples" in found.text

    free(shared=0, disk=wanted - 2**20)
    with pytest.raises(SettingsError, match=r"4 checkpoints of 6.7 GiB.*lower learner.keep_checkp"):
        model.check_disk(settings)

    held = settings.run.folder / "checkpoints" / "step-000001" / "shard"
    held.parent.mkdir(parents=True)
    held.write_bytes(bytes(2**20))
    assert model.check_disk(settings)


def test_a_checkpoint_of_adapters_has_no_whole_weights(settings):
    adapted = with_value(settings, "learner", "lora_rank", 16)

    assert model.sizes_of(adapted).checkpoint < model.sizes_of(settings).checkpoint / 20
    assert model.sizes_of(adapted).published == model.sizes_of(settings).published


@pytest.fixture
def memory(monkeypatch, free):
    """Choose the memory of this machine, which has no card, and room on its disks."""
    free(shared=100 * GIB, disk=1000 * GIB)
    monkeypatch.setattr(model, "smallest_card", lambda: None)
    monkeypatch.setattr(model, "visible_gpus", list)

    def set_to(gib):
        for place in (model, up):
            monkeypatch.setattr(place, "memory_of_machine", lambda: int(gib * GIB))

    return set_to


SHORT = {"learner.microbatch_tokens": 3072}
FULL = SHORT | {"learner.activation_checkpointing": "full"}


def _changed(settings, changes):
    for name, value in changes.items():
        table, key = name.split(".")
        settings = with_value(settings, table, key, value)
    return settings


def _total(settings):
    return sum(model.machine_memory(settings, learner_alone(settings)).values())


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, {"learner.microbatch_tokens": 8192}),
        ({}, {"learner.microbatch_tokens": 4096}),
        (SHORT, {"learner.activation_checkpointing": "full"}),
        (FULL | {"actors.count": 6}, {"actors.count": 1}),
        (FULL | {"run.dtype": "float32"}, {"run.dtype": "bfloat16"}),
        (FULL, {"learner.optimizer": "adamw8bit"}),
        (FULL, {"learner.lora_rank": 16}),
    ],
)
def test_a_run_larger_than_this_machine_is_refused_with_the_setting_that_helps(
    settings, memory, changes, remedy
):
    large = _changed(settings, changes)
    memory(_total(_changed(large, remedy)) / GIB + 0.01)

    with pytest.raises(SettingsError, match=r"^a run must fit the .* of memory of this") as refusal:
        preflight.check_room(large)

    ((name, value),) = remedy.items()
    assert str(refusal.value).endswith(f"; set {name} to {value}")
    assert "GiB, computed" in model.check_memory(_changed(large, remedy))


def test_a_machine_that_is_too_small_for_any_setting_is_said_to_be(settings, memory):
    memory(2)

    with pytest.raises(SettingsError, match=r"choose a smaller model, or a machine with more mem"):
        model.check_memory(settings)


def test_all_processes_of_a_run_are_added_up(settings, memory):
    memory(1000)
    learner = learner_alone(settings)

    parts = model.machine_memory(settings, learner)

    assert parts["learner"] > learner.total
    assert parts["copy of a checkpoint"] == 12 * PARAMETERS
    (one,) = [size for name, size in parts.items() if name.startswith("1 actor(s): libraries, ")]
    assert one > 3 * 2 * PARAMETERS + GIB
    assert model.check_memory(settings).startswith(f"{sum(parts.values()) / GIB:.1f} GiB of this")
    two = model.machine_memory(with_value(settings, "actors", "count", 2), learner)
    (both,) = [size for name, size in two.items() if name.startswith("2 actor(s): ")]
    assert both == 2 * one


SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(("dtype", "measured_gib"), [("float32", 4.16), ("bfloat16", 2.37)])
def test_an_actor_on_a_cpu_takes_what_was_measured_of_smollm2(
    settings, tmp_path, monkeypatch, dtype, measured_gib
):
    """The most that vLLM's process had at a time without shared memory, of 64 episodes."""
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMOLLM2))
    engine = EngineChoice("vllm", "it runs on this machine")
    monkeypatch.setattr(model, "choose_engine", lambda *_, **__: engine)
    small = settings.run.model_copy(update={"dtype": dtype, "groups_per_batch": 8, "group_size": 8})
    given = settings.model_copy(update={"run": small})

    published = model.sizes_of(given).published
    computed = model.engine_on_cpu(given, ModelShape.from_config(SMOLLM2), published) / GIB

    assert computed == pytest.approx(measured_gib, rel=0.2)


def test_a_microbatch_is_counted_as_no_larger_than_a_batch(settings):
    def computed(tokens):
        small = settings.run.model_copy(
            update={"groups_per_batch": 8, "group_size": 8}
            | {"max_prompt_tokens": 96, "max_completion_tokens": 64}
        )
        changed = settings.model_copy(update={"run": small})
        return card_memory(
            with_value(changed, "learner", "microbatch_tokens", tokens), QWEN3, on_gpu=False
        )

    assert computed(32_000) == computed(16_384)
    assert computed(32_000).tokens == 8 * (96 + 8 * 64)
    assert computed(2_048).tokens == 2_048


def test_dry_run_doctor_and_start_check_the_same_room(settings, memory, tmp_path):
    memory(1000)
    in_doctor = [c.name for c in settings_checks(settings, tmp_path) if c.group == "room"]
    assert in_doctor == [check.name for check in preflight.checks_of_room(settings)]

    output = io.StringIO()
    up.say_card_memory(Console(file=output, width=200), settings, None)

    said = output.getvalue()
    assert "on the CPU, for each of 1 rank(s)" in said
    assert "card" not in said
    assert "GiB  together" in said


@pytest.mark.parametrize(
    ("line", "file", "unlimited"),
    [
        ("0::/", "memory.max", "max"),
        ("0::/job/step", "memory.max", "max"),
        ("0::/job/step", "job/memory.max", "max"),
        ("0::/job/step", "job/step/memory.max", "max"),
        ("4:memory:/job/step", "memory/job/memory.limit_in_bytes", "9223372036854771712"),
        ("4:memory:/docker/abc", "memory/memory.limit_in_bytes", "9223372036854771712"),
    ],
)
def test_a_container_or_job_has_the_memory_of_its_limit(
    tmp_path, monkeypatch, line, file, unlimited
):
    whole = machine.memory_of_machine()
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"2:cpu,cpuacct:/else\n{line}\n")
    limit = tmp_path / "groups" / file
    limit.parent.mkdir(parents=True)
    limit.write_text(f"{unlimited}\n")
    assert machine.memory_of_machine() >= whole

    limit.write_text(f"{2**28}\n")
    assert machine.memory_of_machine() == 2**28


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        (
            {
                "max_position_embeddings": 2048,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            8192,
        ),
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            2048,
        ),
        ({}, None),
    ],
)
def test_episodes_longer_than_the_context_are_refused(settings, tmp_path, config, context):
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3 | config))
    fits = settings.run.model_copy(
        update={"max_prompt_tokens": 96, "max_completion_tokens": (context or 10**6) - 96}
    )

    assert model.check_lengths(settings.model_copy(update={"run": fits}))
    if context is None:
        return
    longer = fits.model_copy(update={"max_completion_tokens": context - 95})
    with pytest.raises(SettingsError) as refusal:
        model.check_lengths(settings.model_copy(update={"run": longer}))
    assert f"must be <= {context}, the context of run.model" in str(refusal.value)
    assert f"lower run.max_completion_tokens to {context - 96}" in str(refusal.value)
    wide = settings.model_copy(update={"run": fits})
    with pytest.raises(SettingsError, match=rf"actors\.max_model_len must be <= {context}"):
        model.check_lengths(with_value(wide, "actors", "max_model_len", context + 1))


def test_a_prompt_longer_than_the_context_names_the_prompt(settings, tmp_path):
    (tmp_path / "model" / "config.json").write_text(json.dumps({"n_positions": 512}))

    with pytest.raises(SettingsError, match=r"lower run\.max_prompt_tokens, which alone is 1024"):
        model.check_lengths(settings)


def test_a_learner_larger_than_the_card_fails(settings, monkeypatch):
    monkeypatch.setattr(model, "smallest_card", lambda: 8 * GIB)
    with pytest.raises(SettingsError, match=r"must fit 8\.0 GiB on each card"):
        model.check_memory(settings)

    monkeypatch.setattr(model, "smallest_card", lambda: 80 * GIB)
    assert "of 80.0 GiB on each card, " in model.check_memory(settings)


def test_a_model_of_unknown_size_is_one_failure(settings):
    assert model.check_size(settings) == "1.1 GiB as it is published"
    (settings.run.folder.parent / "model" / "config.json").write_text("{}")

    with pytest.raises(SettingsError, match=r"its sizes in config\.json, got one without"):
        model.check_size(settings)
