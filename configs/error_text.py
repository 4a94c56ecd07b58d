"""Errors of settings in words: path, allowed values, given value, and the setting probably meant.

Owns the wording and the guesses. Ranges are read from the JSON schema of the settings, so that they
are written down once.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .settings import Settings

# --------------------------------------------------------------------------------------------------
# Settings of other projects: the names they give ours, and those that none of ours replaces.
#
# For hints only; none is accepted in place of ours.

ALIASES: dict[str, str] = {
    "run.name": "run_name experiment_name trial_name exp_name",
    "run.directory": "output_dir default_local_dir fileroot save_dir",
    "run.seed": "random_seed rollout_seed",
    "run.deterministic": "full_determinism",
    "run.model": (
        "model.name model.path actor.path actor_rollout_ref.model.path "
        "trainer.policy.model.path hf_checkpoint model_name_or_path model_path pretrain"
    ),
    "run.system_prompt": "system_message system",
    "run.chat_template_kwargs": "apply_chat_template_kwargs enable_thinking",
    "run.stop": "stop_strings stop_sequences stop_words",
    "run.dtype": "torch_dtype param_dtype bf16 precision",
    "run.head_dtype": "fp32_lm_head lm_head_fp32 enable_fp32_lm_head cast_lm_head_to_fp32",
    "run.steps": (
        "max_steps total_steps num_rollout max_train_steps training.steps "
        "total_training_steps num_train_steps total_epochs num_train_epochs "
        "total_train_epochs num_episodes"
    ),
    "run.environment": "env env_id environment_id env_name env_class",
    "run.environments": "envs env_list env_ratios",
    "run.environment_settings": "env_args env_config environment_args",
    "run.reward": (
        "reward_fn reward_func reward_funcs custom_reward_function "
        "custom_reward_function.path reward_function rm_type custom_rm_path remote_rm_url "
        "reward_file"
    ),
    "run.reward_timeout_s": "reward_timeout timeout_per_reward",
    "run.group_size": (
        "num_generations n_samples rollout.n n_samples_per_prompt rollouts_per_example "
        "attempts num_samples"
    ),
    "run.groups_per_batch": (
        "generation_batch_size batch_size train_batch_size global_batch_size "
        "rollout_batch_size local_batch_size prompts_per_step per_device_train_batch_size "
        "num_prompts_per_step"
    ),
    "run.max_policy_lag": (
        "max_staleness max_staleness_steps max_off_policy_steps max_head_offpolicyness "
        "staleness_threshold max_lag async_level max_async_level off_by_n max_policy_age "
        "async_queue_size max_trajectory_age_steps"
    ),
    "run.max_prompt_tokens": (
        "max_prompt_length max_prompt_len rollout_max_prompt_len prompt_max_len"
    ),
    "run.max_completion_tokens": (
        "max_completion_length max_new_tokens max_response_length max_response_len "
        "rollout_max_response_len max_tokens max_generate_length generate_max_len "
        "max_res_tokens"
    ),
    "run.temperature": "sampling.temperature rollout_temperature sampling_temperature",
    "run.eval_every": (
        "eval.interval eval_interval eval_steps test_freq eval_freq evaluator.freq_steps val_period"
    ),
    "run.eval_episodes": "num_examples eval_num_examples num_eval_samples n_eval eval_num_prompts",
    "run.eval_samples": (
        "val_kwargs.n eval_n_samples n_samples_per_eval_prompt n_samples_eval eval_num_generations "
        "num_tests_per_prompt"
    ),
    "buffer.url": "redis_url redis redis_host",
    "buffer.margin": "over_sampling_batch_size oversampling_factor oversample",
    "broker.endpoint": "zmq_endpoint broker_url broker_host broker_port",
    "broker.lease_timeout_s": "lease_timeout visibility_timeout lease_ttl",
    "broker.max_attempts": (
        "max_retries max_rollout_retries rollout_max_attempts max_retries_per_episode"
    ),
    "actors.count": (
        "num_infer_gpus num_actors num_workers num_engines num_inference_engines dp actor_count"
    ),
    "actors.engine": "backend inference_backend generator.backend use_vllm",
    "actors.max_concurrent_episodes": (
        "max_inflight max_inflight_tasks max_concurrent_rollouts "
        "num_parallel_generation_workers llm_max_rollouts max_num_seqs max_concurrent "
        "batch_size_per_actor"
    ),
    "actors.environment_timeout_s": "timeout_per_step step_timeout",
    "actors.max_model_len": (
        "vllm_max_model_length max_model_length max_seq_len seq_len context_length"
    ),
    "actors.gpu_memory_utilization": (
        "gpu_memory_fraction mem_fraction_static vllm_gpu_memory_utilization"
    ),
    "actors.tensor_parallel_size": (
        "tp tp_size tensor_model_parallel_size inference_engine_tensor_parallel_size "
        "rollout_num_gpus_per_engine vllm_tensor_parallel_size"
    ),
    "actors.engine_args": "engine_kwargs.vllm engine_kwargs vllm_kwargs engine_init_kwargs",
    "learner.ranks": (
        "num_train_gpus nproc_per_node num_gpus n_gpus_per_node gpus_per_node world_size "
        "num_trainer_gpus actor_num_gpus_per_node"
    ),
    "parallel.tensor": "actor.tensor_parallel_size tensor_model_parallel_world_size",
    "parallel.sequence": "cp cp_size sp_size ulysses_sequence_parallel_size context_parallel_size",
    "learner.lr": "learning_rate optim.lr optimizer.lr actor_learning_rate adam.lr peak_lr",
    "learner.lr_warmup_steps": "warmup_steps num_warmup_steps lr_warmup_iters warmup",
    "learner.lr_decay": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "learner.lr_min_ratio": "min_lr_ratio min_lr lr_end",
    "learner.lora_rank": "lora_r lora.rank peft_config.r lora_config.r lora_dim",
    "learner.lora_alpha": "lora.alpha peft_config.lora_alpha lora_config.lora_alpha",
    "learner.weight_decay": "wd l2",
    "learner.adam_beta1": "beta1 betas1",
    "learner.adam_beta2": "beta2 betas2",
    "learner.max_grad_norm": "max_norm grad_clip clip_grad gradient_clipping grad_norm_clip",
    "algorithm.advantage": (
        "adv_estimator advantage_estimator algorithm.adv_estimator adv_norm scale_rewards"
    ),
    "algorithm.whiten": (
        "whiten_advantages normalize_advantages advantage_normalization norm_adv_by_std_in_grpo"
    ),
    "algorithm.filter_zero_variance": (
        "filter_zero_advantages filter_groups.enable dynamic_sampling use_dynamic_sampling "
        "dynamic_filtering remove_zero_variance"
    ),
    "algorithm.filter_metric": "filter_groups.metric dynamic_sampling_metric",
    "algorithm.max_gen_batches": "max_num_gen_batches dynamic_sampling_max_gen_batches",
    "replay.capacity": "replay_buffer_size buffer_size",
    "rewards.weights": "reward_weights reward_coefficients",
    "rewards.overlong_buffer_tokens": "overlong_buffer.len overlong_buffer_len",
    "rewards.overlong_penalty": "overlong_buffer.penalty_factor overlong_penalty_factor",
    "rewards.overlong_filter": "mask_truncated_completions overlong_filtering",
    "algorithm.correction": (
        "vllm_importance_sampling_correction rollout_is use_tis off_policy_correction"
    ),
    "algorithm.surrogate": "loss.type loss_type policy_loss_type policy_loss loss_mode",
    "algorithm.aggregation": "loss_agg_mode loss_reduction loss_normalization",
    "algorithm.clip_low": (
        "epsilon eps_clip eps_clip_low clip_ratio clip_ratio_low clip_eps ratio_clip_low "
        "clip_epsilon"
    ),
    "algorithm.clip_high": (
        "epsilon_high eps_clip_high clip_ratio_high clip_eps_high ratio_clip_high"
    ),
    "algorithm.rho_bar": (
        "vllm_importance_sampling_clip_max tis_clip tis_imp_ratio_cap is_correction_threshold "
        "rollout_is_threshold importance_sampling_cap vllm_importance_sampling_cap rho_clip"
    ),
    "algorithm.dual_clip": "delta clip_ratio_c ratio_clip_c eps_clip_c",
    "algorithm.second_moment": "m2_threshold",
    "algorithm.veto": "rollout_token_veto_threshold token_veto_threshold",
    "algorithm.mask_high": "rollout_rs_threshold icepop_beta",
    "algorithm.mask_low": "rollout_rs_threshold_lower icepop_alpha tis_clip_low",
    "algorithm.num_epochs": "ppo_epochs num_ppo_epochs update_epochs num_iterations",
    "algorithm.num_minibatches": "ppo_n_minibatches num_mini_batches ppo_mini_batch_size",
    "algorithm.proximal": "prox_logp_method recompute_logprob use_decoupled_loss",
    "algorithm.entropy_bonus": "entropy_coeff entropy_coef ent_coef entropy_loss_coef",
    "algorithm.entropy_target": "target_entropy adaptive_entropy_target",
    "algorithm.kl_coefficient": "beta kl_beta kl_coef kl_ctl kl_loss_coef init_kl_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty_type",
    "algorithm.kl_in": "use_kl_loss use_kl_in_reward",
    "algorithm.kl_target": "target_kl kl_ctrl.target_kl",
    "algorithm.reference_model": "ref_model ref_model_path reference_model_path",
    "algorithm.teacher": (
        "teacher_model teacher_model_path teacher_model_name_or_path teacher_load opd_teacher_load"
    ),
    "algorithm.teacher_weight": "opd_kl_coef distillation_loss_coef distill_coef",
    "sft.data": "dataset_name train_dataset train_files",
    "sft.held_out": "eval_dataset",
    "critic.kind": "use_critic value_model critic_model",
    "critic.lr": "critic_lr critic_learning_rate critic.optim.lr value_lr",
    "critic.warmup_batches": "critic_warmup freezing_actor_steps critic_warmup_steps",
    "critic.coefficient": "vf_coef value_loss_coef vf_loss_coeff baseline_cost",
    "critic.clip": "value_clip cliprange_value vf_clip vf_clip_param value_clip_eps",
    "critic.gamma": "discount discounting discount_factor",
    "critic.lam": "gae_lambda lambd gae_lam",
    "critic.rho_bar": "clip_rho_threshold vtrace_clip_rho_threshold rho_hat",
    "critic.c_bar": "clip_c_threshold c_clip",
    "learner.microbatch_tokens": (
        "micro_batch_size max_tokens_per_gpu ppo_max_token_len_per_gpu max_tokens_per_mb "
        "train_micro_batch_size gradient_accumulation_steps"
    ),
    "learner.activation_checkpointing": (
        "gradient_checkpointing enable_gradient_checkpointing recompute_granularity"
    ),
    "learner.checkpoint_every": (
        "ckpt.interval ckpt_interval save_steps save_interval save_freq checkpoint.interval "
        "save_checkpoint_steps checkpoint_interval"
    ),
    "learner.keep_checkpoints": (
        "keep_last save_total_limit max_ckpt_num max_ckpt_to_keep max_actor_ckpt_to_keep"
    ),
    "learner.publish_every": (
        "weight_sync_steps sync_every trigger_parameter_sync_step update_weights_interval "
        "weight_update_interval policy_update_every communication_interval"
    ),
    "learner.broadcast": "weight_broadcast weight_sync_backend weight_update_mode",
}
"""Our setting -> names that the same thing has elsewhere, with spaces between them.

A dot keeps the table where the last word alone is too vague."""


ANSWERS = {
    **dict.fromkeys(
        ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        "has no counterpart: ratios compare the policies' whole distributions, and a truncated or "
        "penalised one is that of neither; use run.temperature",
    ),
    "load_balancing_strategy": (
        "has no counterpart: an actor takes its next task when it has room, so the least loaded "
        "one gets it; bound how many it has by actors.max_concurrent_episodes"
    ),
    "prompt_file": "is `path` in run.environment_settings, with run.environment: dataset",
    "retry_options": (
        "has no counterpart: a process that ends is always started again, after a growing pause; "
        "set how often a task is tried by broker.max_attempts"
    ),
    "policy_sets": (
        "has no counterpart: after a lack of memory the learner takes smaller microbatches than "
        "learner.microbatch_tokens, and connections are tried again; leave it out"
    ),
}
"""Settings of others that none of ours replaces -> what is said to whoever asks for one."""


def owner_of(path: str) -> str | None:
    """Find Nyala's name for a peer's setting.

    Args:
        path: A dotted path or a command-line flag as a person typed it, such as
            `actor_rollout_ref.rollout.n` or `--eps-clip`.

    Returns:
        Our `table.key`, or None. The longest tail of the path that another project uses decides.
    """
    words = path.lstrip("-").replace("-", "_").lower().split(".")
    for first in range(len(words)):
        name = _OWNERS.get(".".join(words[first:]))
        if name is not None:
            return name
    return None


_OWNERS = {alias: setting for setting, aliases in ALIASES.items() for alias in aliases.split()}


# --------------------------------------------------------------------------------------------------
# Errors of settings in words: path, allowed values, given value, and the setting probably meant.

Schema = dict[str, Any]
"""A JSON schema, or a part of one."""

NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a table",
    "null": "null",
}
BOUNDS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "multipleOf": "a multiple of",
}
PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$": "a word of letters, digits, `_`, `.` and `-`",
    r"^tcp://.+:\d+$": "an address such as tcp://127.0.0.1:5757",
    r"^(\[[0-9A-Fa-f:]+\]|[^\s/:\[\]]+)(:\d{1,5})?$": "a host or host:port, such as hub:5758",
    r"^http://[^/]+:\d+$": "an address such as http://127.0.0.1:9470",
    r"^(.+\.py|[\w.]+):\w+$|^[\w.-]+/\w+$": (
        "path/to/file.py:function, module:function or package/name"
    ),
    r"^(uniform|difficulty|.+:.+)$": "uniform, difficulty, path/to/file.py:function or "
    "module:function",
}
"""Regular expressions of the schema in words."""


def describe_all(error: ValidationError) -> list[str]:
    """Describe every problem that pydantic found, in its order."""
    lines: dict[
        str, None
    ] = {}  # a union reports one problem for each of its branches; we word the setting once
    for detail in error.errors(include_url=False):
        for line in _describe(detail):
            lines[line] = None
    return list(lines)


def unknown_key(path: Sequence[str], value: object) -> str:
    """Report that a key is not a setting, and suggest one."""
    settings = _properties()
    where = "$." + ".".join(path)
    answer = next((ANSWERS[part] for part in path if part in ANSWERS), None)
    if answer is not None:
        return f"{where} {answer}"
    if own_keys := _keys_below(path[:-1]):
        near = difflib.get_close_matches(path[-1], own_keys, n=1, cutoff=0.75)
        then = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(own_keys)}"
        return f"{where} is not a setting, got {_as_yaml(value)}; {then}"
    guess = suggest(path)
    if guess is not None:
        return f"{where} is not a setting, got {_as_yaml(value)}; did you mean {guess}?"
    table = path[0]
    if len(path) > 1 and any(setting.startswith(f"{table}.") for setting in settings):
        keys = ", ".join(
            setting.partition(".")[2] for setting in settings if setting.startswith(f"{table}.")
        )
        return f"{where} is not a setting, got {_as_yaml(value)}; {table} has {keys}"
    tables = ", ".join(dict.fromkeys(setting.partition(".")[0] for setting in settings))
    return f"{where} is not a setting, got {_as_yaml(value)}; the tables are {tables}"


def suggest(path: Sequence[str]) -> str | None:
    """Guess which setting an unknown path means.

    First a slip of the pen in the same table, then the same key in another table, then a peer's
    name, then anything close.
    """
    settings = list(_properties())
    table, key = (path[0] if len(path) > 1 else ""), path[-1].lower().replace("-", "_")
    near = difflib.get_close_matches(
        key,
        [setting.partition(".")[2] for setting in settings if setting.startswith(f"{table}.")],
        n=1,
        cutoff=0.75,
    )
    if table and near:
        return f"{table}.{near[0]}"
    homes = [setting for setting in settings if setting.partition(".")[2] == key]
    if len(homes) == 1:
        return homes[0]
    alias = owner_of(".".join(path))
    if alias is not None:
        return alias
    if len(homes) > 1:
        return " or ".join(homes)
    close = difflib.get_close_matches(".".join([*path[:-1], key]), settings, n=1, cutoff=0.8)
    if not close:
        close = difflib.get_close_matches(
            key, [setting.partition(".")[2] for setting in settings], n=1, cutoff=0.8
        )
        close = [setting for setting in settings if close and setting.endswith(f".{close[0]}")][:1]
    return close[0] if close else None


def allowed(path: str) -> str:
    """Describe the allowed values of a setting, such as `a whole number >= 1`.

    Args:
        path: `table.key`, or deeper, such as `run.environments.0.share`.
    """
    return _constraint(_schema_of(path.split(".")) or {})


def meaning(path: str) -> str:
    """Return the first sentence of a setting's description; its path is as for `allowed`."""
    text = str((_schema_of(path.split(".")) or {}).get("description", "")).replace("\n", " ")
    return text.partition(". ")[0].rstrip(".")


def _describe(detail: ErrorDetails) -> Iterator[str]:
    path = tuple(str(part) for part in detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        for leaf, inner in _leaves(path, value):
            yield unknown_key(leaf, inner)
        return
    if kind == "missing":
        yield from _missing(path)
        return
    # In a union, the path goes on with the name of a branch.
    prefixes = [path[:end] for end in range(len(path), 1, -1) if _schema_of(path[:end])]
    if prefixes:
        setting = ".".join(prefixes[0])
        about = f"; it is: {meaning(setting)}" if meaning(setting) else ""
        yield f"$.{setting} must be {allowed(setting)}, got {_as_yaml(value)}{about}"
    elif len(path) == 1:
        yield f"$.{path[0]} must be a table of keys, got {_as_yaml(value)}"
    else:
        # The checks across tables: their text already names what is wrong and what follows.
        text = str(detail["msg"]).removeprefix("Value error, ")
        begins = re.match(r"(\w+)\.\w+", text)
        yield f"$.{text}" if begins and begins[1] in Settings.model_fields else text


def _missing(path: tuple[str, ...]) -> Iterator[str]:
    if len(path) == 1:
        required = [setting for setting in _required() if setting.startswith(f"{path[0]}.")]
        yield from (_missing_key(setting) for setting in required)
    else:
        yield _missing_key(".".join(path))


def _missing_key(setting: str) -> str:
    return f"$.{setting} must be {allowed(setting)}, got nothing; it is: {meaning(setting)}"


def _leaves(path: tuple[str, ...], value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """List the single settings below an unknown key: files of peers are nested deeper."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    else:
        yield path, value


def _constraint(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_constraint(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(str(choice) for choice in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if "pattern" in schema:
        return PATTERNS.get(schema["pattern"], f"text like {schema['pattern']}")
    if schema.get("format") == "path":
        return "a path"
    kind = str(_resolved(schema).get("type"))
    if kind == "array":
        return _items_constraint(schema)
    noun = NOUNS.get(kind, "a value")
    bounds = [f"{sign} {_number(schema[key])}" for key, sign in BOUNDS.items() if key in schema]
    return f"{noun} {' and '.join(bounds)}".rstrip()


def _items_constraint(schema: Schema) -> str:
    if "prefixItems" in schema:
        return (
            f"a list of {len(schema['prefixItems'])}, each {_constraint(schema['prefixItems'][0])}"
        )
    return f"a list, each {_constraint(schema.get('items', {}))}"


def _number(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)


def _as_yaml(value: object) -> str:
    """Write a value as in YAML, short."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:50]}...{text[-27:]}"  # with its closing quote


@cache
def _whole_schema() -> Schema:
    return Settings.model_json_schema()


@cache
def _properties() -> dict[str, Schema]:
    """Return the schema of every `table.key`, in the order of the settings."""
    return {
        f"{table}.{key}": part
        for table, reference in _whole_schema()["properties"].items()
        for key, part in _resolved(reference)["properties"].items()
    }


def _schema_of(path: Sequence[str]) -> Schema | None:
    """Return the schema of a setting, or of what is below one; None if there is none."""
    schema = _properties().get(".".join(path[:2]))
    for part in path[2:]:
        table = _resolved(_table_in(schema or {}))
        schema = table.get("items") if part.isdigit() else table.get("properties", {}).get(part)
    return schema


def _table_in(schema: Schema) -> Schema:
    """Return the table of a schema that allows a table or null; any other schema as it is."""
    branches: list[Schema] = schema.get("anyOf", [])
    return next((branch for branch in branches if "$ref" in branch), schema)


def _resolved(schema: Schema) -> Schema:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return _whole_schema()["$defs"][name] if name else schema


def _keys_below(path: Sequence[str]) -> list[str]:
    """Return the keys of a table within a setting."""
    schema = _schema_of(path) if len(path) > 2 else None
    return list(_resolved(_table_in(schema or {})).get("properties", {}))


@cache
def _required() -> list[str]:
    """List every `table.key` that has no default."""
    return [
        f"{table}.{key}"
        for table, reference in _whole_schema()["properties"].items()
        for key in _resolved(reference).get("required", [])
    ]
