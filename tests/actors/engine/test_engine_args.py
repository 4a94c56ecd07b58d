"""Further arguments of vLLM's engine: those that are refused, and the names that it has."""

from __future__ import annotations

import pytest

from actors.engine import engine_args
from actors.engine.engine_args import OWN_SETTINGS, REFUSED, check_engine_args, known_arguments
from configs.errors import SettingsError


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("max_num_seqs", "set actors.max_concurrent_episodes"),
        ("logprobs_mode", "log-probs would not be"),
        ("speculative_config", "log-probs would not be"),
        ("kv_cache_dtype_skip_layers", "log-probs would not be"),
        ("quantization_config", "weights of the learner could not"),
        ("stream_interval", "every token is taken as it is made"),
        ("scheduler_cls", "the version of the weights"),
        ("data_parallel_size", "start more actors"),
    ],
)
def test_what_breaks_a_promise_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=f"actors.engine_args must not have {name}.*{reason}"):
        check_engine_args({"block_size": 16, name: 2})


def test_what_only_changes_the_speed_passes() -> None:
    check_engine_args(
        {"max_num_batched_tokens": 8192, "compilation_config": {"level": 0}, "block_size": 32}
    )


def test_a_name_that_vllm_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset({"max_num_batched_tokens"})
    monkeypatch.setattr(engine_args, "known_arguments", lambda: known)

    with pytest.raises(SettingsError, match="got max-num-batchd-tokens; did you mean max_num"):
        check_engine_args({"max-num-batchd-tokens": 8192})


def test_without_vllm_no_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    check_engine_args({"anything": 1})


def test_all_that_is_refused_is_an_argument_of_the_installed_vllm() -> None:
    known = known_arguments()
    if not known:
        pytest.skip("vLLM is not installed")

    assert {*OWN_SETTINGS, *REFUSED} <= known
    for prefix in engine_args._PREFIXES:
        assert any(name.startswith(prefix) for name in known), prefix
