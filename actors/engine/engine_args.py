"""`actors.engine_args`: further arguments of vLLM's engine, and the reasons why some are refused.

Every token must have the log-prob of the whole distribution that it was sampled from, and the
version of the weights that made it; and the weights must be exactly the learner's. An argument that
breaks one of these is refused by name. `nyala up` and every actor check them; what passes is still
held to the probe when an actor starts.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from configs.errors import SettingsError

CPU_KV_CACHE_GIB = 1
"""KV cache of an engine on a CPU where `actors.kv_cache_gib` is null."""
OWN_SETTINGS = {
    "model": "run.model",
    "dtype": "run.dtype",
    "max_model_len": "actors.max_model_len",
    "max_num_seqs": "actors.max_concurrent_episodes",
    "tensor_parallel_size": "actors.tensor_parallel_size",
    "gpu_memory_utilization": "actors.gpu_memory_utilization",
    "kv_cache_memory_bytes": "actors.kv_cache_gib",
    "distributed_executor_backend": "actors.in_process",
}
"""Arguments that follow from a setting."""

_LOGPROBS = "log-probs would not be those of the policy that the learner trains"
_WEIGHTS = "weights of the learner could not be loaded into it exactly"
_VERSIONS = "the version of the weights that made each token would be lost"
_ALL = "every token is taken as it is made"
_ALONE = "an actor is one engine; start more actors"
_TOKENS = "the engine is given token ids and returns token ids"
_PREFIXES = {
    "data_parallel": _ALONE,
    "pipeline_parallel": _WEIGHTS,
    "enable_lora": _WEIGHTS,
    "quantization": _WEIGHTS,
    "offload_": _WEIGHTS,
    "cpu_offload": _WEIGHTS,
    "spec_": _LOGPROBS,
    "speculative_": _LOGPROBS,
    "kv_cache_dtype": _LOGPROBS,
    "tokenizer": _TOKENS,
    "sleep_": _WEIGHTS,
}
_NAMES = {
    _LOGPROBS: (
        "logprobs_mode generation_config override_generation_config logits_processors "
        "watermark_config diffusion_config structured_outputs_config kv_sharing_fast_prefill "
        "hf_overrides hf_config_path model_class_overrides mamba_cache_dtype "
        "mamba_ssm_cache_dtype enable_mamba_cache_stochastic_rounding"
    ),
    _WEIGHTS: (
        "weight_transfer_config load_format model_weights model_impl revision "
        "worker_cls worker_extension_cls enable_sleep_mode enable_eplb enable_elastic_ep "
        "pt_load_map_location allow_deprecated_quantization"
    ),
    _VERSIONS: "scheduler_cls kv_transfer_config",
    _ALL: "stream_interval",
    _TOKENS: "skip_tokenizer_init runner convert enable_prompt_embeds reasoning_parser",
    "each actor draws its own": "seed",
    _ALONE: "nnodes node_rank",
}
REFUSED = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""Argument -> what it would break."""


def check_engine_args(arguments: Mapping[str, object]) -> None:
    """Refuse arguments that break what Nyala promises, and those that vLLM does not have.

    Args:
        arguments: `actors.engine_args`. Where vLLM is installed, their names are looked up in its
            source: to import it would take seconds. Elsewhere names unknown here pass.

    Raises:
        SettingsError: An argument may not be set; the text names it and says what to do instead.
    """
    names = known_arguments()
    for name in arguments:
        if name in OWN_SETTINGS:
            raise SettingsError(
                f"actors.engine_args must not have {name}; set {OWN_SETTINGS[name]}"
            )
        reason = REFUSED.get(name) or next(
            (why for prefix, why in _PREFIXES.items() if name.startswith(prefix)), None
        )
        if reason is not None:
            raise SettingsError(f"actors.engine_args must not have {name}: {reason}; leave it out")
        if names and name not in names:
            raise SettingsError(_unknown(name, names))


def known_arguments() -> frozenset[str]:
    """Read the names of the fields of vLLM's `EngineArgs`; none where vLLM is not installed."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return frozenset()
    source = (Path(vllm.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return frozenset(
        field.target.id
        for class_ in classes
        if class_.name == "EngineArgs"
        for field in class_.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def _unknown(name: str, names: frozenset[str]) -> str:
    close = get_close_matches(name.replace("-", "_"), names, n=1)
    advice = f"did you mean {close[0]}?" if close else "`vllm serve --help=all` lists them"
    return f"actors.engine_args must have only arguments of vLLM's engine, got {name}; {advice}"
