"""vLLM engine: `LLMEngine` stepped by a thread, its core in this process or its own.

On a CPU the core lives in the actor's process: it starts in a third of the time, and there is no
device whose idling a second process would hide. On a GPU it runs in a process of its own and
`step` only collects what it made. Either way one thread sees tokens and weight swaps in one order,
so the version of every token is exact; AsyncLLM gives each request a queue of its own, and reports
versions at its end only.

KV and versions: running requests keep their KV cache over a swap. Prefixes cached under an older
version must not serve later requests, so the cache is salted with the count of swaps; a request
that waits for its first token when the weights change begins again under the new salt.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from buffer.record.episode import PolicyVersion
from configs.errors import EngineError

from .device import engine_device
from .engine import INITIAL_VERSION, Request, Sampled, StagedWeights
from .threaded import ThreadedEngine
from .vllm_private import has_outputs, shut_down, take_unsent
from .wire_tensors import named_tensors

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

    from .vllm_shadow import ShadowModel

STREAM_INTERVAL = 8
"""Tokens of a request that vLLM returns together, the first and the last ones apart: to hand one
over costs Python as much time as several of them cost a small model."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of vLLM; see `actors` in the settings."""

    model: str
    """Hugging Face model directory or hub name."""
    max_model_len: int
    dtype: str = "float32"
    max_concurrent: int = 256
    in_process: bool = True
    threads: int = 1
    """OpenMP threads on a CPU."""
    kv_cache_gib: int = 1
    """KV cache on a CPU, GiB."""
    gpu_memory_utilization: float = 0.85
    tensor_parallel_size: int = 1
    seed: int = 0
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, checked by `engine_args.check_engine_args`."""


def vllm_engine(
    options: VllmOptions, *, version: PolicyVersion = INITIAL_VERSION
) -> ThreadedEngine:
    """Make a vLLM engine whose first weights are `version`; `start` loads it."""
    return ThreadedEngine(
        VllmStepper(options), max_model_len=options.max_model_len, version=version
    )


class VllmStepper:
    """vLLM's `LLMEngine` as a `Stepper`."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._num_swaps = 0
        self._waiting: dict[int, tuple[Request, int]] = {}
        """Requests without a first token, which a swap begins again."""
        self._engine: LLMEngine
        self._shadow: ShadowModel | None = None

    def start(self) -> None:
        """Import vLLM, load the model, and run one token through it."""
        _prepare_environment(self._options)
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - vLLM
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - vLLM

        from . import vllm_weights  # noqa: PLC0415 - vLLM

        vllm_weights.register()
        arguments = _engine_arguments(self._options, vllm_weights.BACKEND)
        try:
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(**arguments), enable_multiprocessing=not self._options.in_process
            )
        except (TypeError, ValueError) as error:
            if not self._options.engine_args:
                raise
            raise EngineError(_refused_arguments(self._options.engine_args, error)) from error
        self._rpc("init_weight_transfer_engine", init_info={})
        if self._options.in_process and engine_device() == "cpu":
            from .vllm_shadow import shadow_of  # noqa: PLC0415 - vLLM

            (self._shadow,) = self._engine.collective_rpc(shadow_of)
        self.begin_probe(0, (0, 0))  # kernels compile with the first request
        while self.has_work:
            self._engine.step()

    @property
    def vocabulary(self) -> int:
        """The model's; vLLM checks no ids where it has no tokenizer."""
        return int(self._engine.model_config.get_vocab_size())

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def admit(self, key: int, request: Request, max_tokens: int) -> None:
        """Add a request under the salt of the current weights."""
        from vllm.exceptions import VLLMClientError  # noqa: PLC0415 - vLLM

        self._waiting[key] = request, max_tokens
        try:
            self._add(key, request.token_ids, _sampling(request, max_tokens))
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses the request: {error}") from error

    def cancel(self, keys: list[int]) -> None:
        """Drop requests."""
        for key in keys:
            self._waiting.pop(key, None)
        self._engine.abort_request([str(key) for key in keys])

    def begin_probe(self, key: int, token_ids: tuple[int, ...]) -> None:
        """Ask for the log-probs of a prompt: vLLM then computes all of it, cached prefix or not."""
        from vllm import SamplingParams  # noqa: PLC0415 - vLLM

        self._add(
            key,
            token_ids,
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True),
        )

    def step(self) -> Iterable[Sampled]:
        """Run one step of vLLM's scheduler, or collect what the other process made."""
        waiting = self._waiting
        for output in self._engine.step():
            key = int(output.request_id)
            if key in waiting:
                del waiting[key]
            if output.prompt_logprobs:
                yield Sampled(key, [], _prompt_logprobs(output), "stop")
            else:
                made = output.outputs[0]
                yield Sampled(key, made.token_ids, made.logprobs.logprobs, made.finish_reason)

    def pause(self) -> Iterable[Sampled]:
        """Stop the scheduler with its requests and KV kept; collect what is on its way."""
        self._engine.sleep(level=0, mode="keep")
        if not self._options.in_process:
            # The answer to the call above came behind all outputs, and through the same socket.
            while has_outputs(self._engine):
                yield from self.step()
        for key, token_ids, logprobs in take_unsent(self._engine):
            yield Sampled(key, token_ids, logprobs, None)

    def prepare(self, staged: StagedWeights) -> None:
        """Fill the shadow copy; where there is none, refuse a bad file while all is whole."""
        if self._shadow is not None:
            self._shadow.fill(staged)
            return
        manifest = staged.manifest
        for _ in named_tensors(staged.path, manifest.tensors, manifest.num_bytes):
            pass

    def load(self, staged: StagedWeights) -> None:
        """Exchange weights and shadow, or load in place through vLLM's own interface."""
        manifest = staged.manifest
        if self._shadow is not None:
            self._shadow.exchange()
        else:
            self._load_in_place(staged)
        self._engine.set_weight_version(f"{manifest.version.lineage}.{manifest.version.step}")
        self._num_swaps += 1
        self._begin_waiting_again()

    def resume(self) -> None:
        """Let the scheduler run again."""
        self._engine.wake_up(tags=["scheduling"])

    def close(self) -> None:
        """Stop vLLM's core."""
        if hasattr(self, "_engine"):
            shut_down(self._engine)
            del self._engine

    def _load_in_place(self, staged: StagedWeights) -> None:
        from .vllm_weights import update_payload  # noqa: PLC0415 - vLLM

        self._rpc("start_weight_update")
        self._rpc("update_weights", update_info=update_payload(staged))
        self._rpc("finish_weight_update")

    def _begin_waiting_again(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._engine.abort_request([str(key) for key in waiting])
        for key, (request, max_tokens) in waiting.items():
            self.admit(key, request, max_tokens)

    def _add(self, key: int, token_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        from vllm.inputs import tokens_input  # noqa: PLC0415 - vLLM

        prompt = tokens_input(list(token_ids), cache_salt=str(self._num_swaps))
        self._engine.add_request(str(key), prompt, sampling)

    def _rpc(self, method: str, **kwargs: Any) -> None:
        self._engine.collective_rpc(method, kwargs=kwargs)


def _prepare_environment(options: VllmOptions) -> None:
    # vLLM reads these at import and at start. What a person has set stays.
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # A process that was forked after its parent has met CUDA cannot use it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Pinned workers of several actors would share one core and leave the other idle.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(options.threads),
        # Its processes are all on this machine. Our weight groups name their own interface.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if options.in_process else "1"
    if options.in_process:
        # Those of this thread: for it the environment comes too late.
        torch.set_num_threads(options.threads)


def _engine_arguments(options: VllmOptions, backend: str) -> dict[str, Any]:
    from vllm.config import WeightTransferConfig  # noqa: PLC0415 - vLLM

    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_concurrent,
        "stream_interval": STREAM_INTERVAL,
        "tensor_parallel_size": options.tensor_parallel_size,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults out of the model's folder
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=backend),
    }
    if engine_device() == "cuda":
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    else:
        arguments |= {
            "enforce_eager": True,
            "distributed_executor_backend": "uni" if options.in_process else "mp",
            "kv_cache_memory_bytes": options.kv_cache_gib * 2**30,
        }
    return arguments | dict(options.engine_args)


def _refused_arguments(given: Mapping[str, Any], error: Exception) -> str:
    reason = " ".join(str(error).split())[:500]
    return (
        f"actors.engine_args must be what vLLM's engine takes, got {dict(given)}; remove what it "
        f"refuses: {reason}"
    )


def _sampling(request: Request, max_tokens: int) -> SamplingParams:
    from vllm import SamplingParams  # noqa: PLC0415 - vLLM
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - vLLM

    return SamplingParams(
        temperature=request.temperature,
        max_tokens=max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # only the request decides where it ends
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def _prompt_logprobs(output: RequestOutput) -> list[float]:
    if output.prompt_token_ids is None or output.prompt_logprobs is None:
        raise EngineError("vLLM must answer a probe with log-probs, got none; see its version")
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [position[token].logprob for token, position in pairs]
