"""vLLM engine: requests, tokens and swaps of its core, in this process or in one of its own.

On a CPU the core lives in the actor's process: it starts in a third of the time, and there is no
device whose idling a second process would hide. On a GPU it runs in a process of its own and
`step` only collects what it made. Either way one thread sees tokens and weight
swaps in one order, so the version of every token is exact; AsyncLLM gives each request a queue of
its own, and reports versions at its end only.

KV and versions: running requests keep their KV cache over a swap, unless it is recomputed
(`VllmOptions.recompute_kv`); tokens and log-probs that they have already stay. Prefixes cached
under an older version must not serve later requests, so the cache is salted with the count of
swaps; a request that waits for its first token when the weights change begins again under the new
salt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import structlog
from msgspec import convert, to_builtins

from actors.capacity import CacheMeter
from configs.errors import EngineDied, EngineUnfit, WeightsError
from configs.forks import forks_let_go
from configs.machine import compiled_folders
from configs.worker import Worker

from .choice import engine_device
from .engine import GenerationRequest, Sampled, StagedWeights
from .threaded import ThreadedEngine
from .vllm_options import (
    VllmOptions,
    engine_arguments,
    prepare_environment,
    refused_arguments,
    without_preloads,
)
from .vllm_private import (
    OUTPUTS_S,
    CoreClient,
    Sampling,
    core_client,
    core_processes,
    end_waits,
    has_outputs,
    import_model,
    new_request,
    next_outputs,
    prompt_logprobs,
    sampled_logprobs,
    shut_down,
    watch_cache,
)
from .wire_tensors import PreparationState, VersionFile, named_tensors

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from actors.engine.weights.shadow_model import ShadowModel


log = structlog.get_logger()

# --------------------------------------------------------------------------------------------------
# End of vLLM's core in a process of its own, and what waits for that core.
#
# vLLM watches the process and stops reading its socket once it is gone, but it ends no wait for
# outputs or for the answer to a call: `LLMEngine.step` would never return. `CoreWatch` ends them.
#
#     core runs --SIGKILL, SIGABRT, out of memory--> all it sent is in the queue of outputs
#               --> an error behind it, and in every call --> whoever waits raises it

SETTLE_S = 2 * OUTPUTS_S
"""Longest wait for `end_waits`, which takes less."""


class CoreWatch:
    """Watches the processes of one core from a thread of its own.

    Args:
        client: vLLM's client of the core.
    """

    def __init__(self, client: CoreClient) -> None:
        self._client = client
        # Kept here: the sentinel of a process that is collected would be another file's number.
        self._processes = core_processes(client)
        self._is_closing = False
        self._worker = Worker(self._watch, name="core-watch").start()

    def check_processes(self) -> None:
        """Look at the processes.

        Raises:
            EngineDied: One has ended.
        """
        self._worker.raise_if_failed()
        if self._has_ended(timeout_s=0):
            raise self._death()

    def settle(self) -> None:
        """Wait until all that a core sent before it ended is in the queue, at most 4 s.

        Returns at once while the core runs.
        """
        if self._has_ended(timeout_s=0):
            self._worker.join(SETTLE_S)

    def kill(self) -> None:
        """Send SIGKILL to a core that hangs; what waits for it ends as after any other death."""
        for process in self._processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Expect the end of the core from now on."""
        self._is_closing = True

    def _watch(self) -> None:
        self._has_ended(timeout_s=None)
        if not self._is_closing:
            end_waits(self._client, self._death())

    def _has_ended(self, *, timeout_s: float | None) -> bool:
        sentinels = [process.sentinel for process in self._processes]
        return bool(connection.wait(sentinels, timeout_s))

    def _death(self) -> EngineDied:
        codes = [process.exitcode for process in self._processes]
        how = next((f" with code {code}" for code in codes if code is not None), "")
        return EngineDied(
            f"the process of vLLM's core must keep running, got its exit{how}; look for a "
            "full memory or a lost GPU in the machine's log"
        )


# --------------------------------------------------------------------------------------------------
# Requests of vLLM's core, and their tokens as it makes them.
#
# `LLMEngine.step` makes of each step what a server wants: texts, ranks, sums and an object for
# every request, which takes Python as long as an eighth of a small model's step. An actor wants
# token ids and log-probs, so it takes them where the core hands them over. Nothing is held back
# there: a token that was made has been returned.


@dataclass(slots=True)
class _HeldRequest:
    """A request of the core, kept to add it anew after a swap."""

    key: int
    token_ids: tuple[int, ...]
    sampling: Sampling
    has_begun: bool = False


class CoreRequests:
    """The requests of one core."""

    def __init__(self, core: CoreClient) -> None:
        """Begin with no request."""
        self._core = core
        self._names = map(str, count(1))
        """Names that are used once: a core may still have tokens of a request that was dropped."""
        self._held: dict[str, _HeldRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: int, token_ids: tuple[int, ...], sampling: Sampling, *, salt: str) -> None:
        """Add a request to the core.

        Args:
            key: Number that `step` returns with the tokens of the request.
            token_ids: At least one, each below the model's vocabulary.
            sampling: Parameters of sampling; requests may share them, as the core only reads.
            salt: Cached prefixes are shared by requests of one salt.
        """
        name = next(self._names)
        self._held[name] = _HeldRequest(key, token_ids, sampling)
        self._core.add_request(new_request(name, list(token_ids), sampling, salt))

    def drop(self, keys: Iterable[int]) -> None:
        """Drop requests; unknown keys are ignored."""
        unwanted = set(keys)
        names = [name for name, held in self._held.items() if held.key in unwanted]
        for name in names:
            del self._held[name]
        self._core.abort_requests(names)

    def begin_again(self, *, salt: str) -> None:
        """Drop all requests that have no token yet, and add them anew."""
        waiting = [held for held in self._held.values() if not held.has_begun]
        self.drop(held.key for held in waiting)
        for held in waiting:
            self.add(held.key, held.token_ids, held.sampling, salt=salt)

    def step(self) -> Iterator[Sampled]:
        """Run one step of a core in this process, or wait for a step of one in another."""
        requests = self._held
        for output in next_outputs(self._core):
            held = requests.get(output.request_id)
            if held is None:
                continue
            reason = output.finish_reason
            if reason is not None:
                del requests[output.request_id]
            if output.new_prompt_logprobs_tensors is not None:
                yield Sampled(held.key, [], prompt_logprobs(output), "stop")
                continue
            held.has_begun = True
            finish_reason = None if reason is None else str(reason)
            yield Sampled(held.key, output.new_token_ids, sampled_logprobs(output), finish_reason)


# --------------------------------------------------------------------------------------------------
# vLLM engine: requests, tokens and swaps of its core, in this process or in one of its own.


def vllm_engine(options: VllmOptions, *, meter: CacheMeter | None = None) -> ThreadedEngine:
    """Make a vLLM engine of the run's first weights; `start` loads them."""
    return ThreadedEngine(VllmStepper(options, meter), max_model_len=options.max_model_len)


class VllmStepper:
    """vLLM's `LLMEngine` as a `Stepper`."""

    def __init__(self, options: VllmOptions, meter: CacheMeter | None = None) -> None:
        self._options, self._meter = options, meter
        self._num_swaps = 0
        self._way = ""
        """The workers' way to load weights that was logged last."""
        self._engine: LLMEngine
        self._requests: CoreRequests
        self._shadow: ShadowModel | None = None
        self._watch: CoreWatch | None = None
        """Watch over a core in another process."""

    def start(self) -> None:
        """Import vLLM, load the model, and run one token through it.

        Sets environment variables of this process that vLLM reads (`prepare_environment`).

        Raises:
            EngineUnfit: vLLM refuses `engine_args`.
        """
        prepare_environment(self._options)
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - vLLM
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415 - vLLM
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - vLLM

        if engine_device() == "cpu":
            import_model(self._options.model)
        arguments = self._arguments()
        try:
            with without_preloads(), forks_let_go():
                self._engine = LLMEngine.from_engine_args(
                    EngineArgs(**arguments),
                    # A batch is what we run. Another context has no default for the tokens of a
                    # step, and prefills 2,048 at a time where a card takes 8,192 or 16,384.
                    usage_context=UsageContext.LLM_CLASS,
                    enable_multiprocessing=not self._options.in_process,
                )
        except (TypeError, ValueError) as error:
            if not self._options.engine_args:
                raise
            raise EngineUnfit(refused_arguments(self._options.engine_args, error)) from error
        core = core_client(self._engine)
        self._requests = CoreRequests(core)
        if self._meter is not None:
            watch_cache(core, self._meter.record)
        if not self._options.in_process:
            self._watch = CoreWatch(core)
        self._rpc("nyala_serve", line=self._options.line)
        if self._options.probe_temperature != 1:
            self._rpc("nyala_divide_logits", temperature=self._options.probe_temperature)
        if self._options.in_process and engine_device() == "cpu":
            from actors.engine.weights.shadow_model import shadow_of  # noqa: PLC0415 - vLLM

            (self._shadow,) = self._engine.collective_rpc(shadow_of)
        self.begin_probe(0, (0, 0))  # kernels compile with the first request
        while self.has_work:
            for _ in self.step():
                pass

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's engine, and log what they make it do first."""
        arguments = engine_arguments(self._options)
        if self._meter is not None:
            arguments["disable_log_stats"] = False
        if not arguments.get("enforce_eager"):
            stage = "loading the model, compiling what is not kept yet, making CUDA graphs"
            log.info("starting", stage=stage, **compiled_folders())
        return arguments

    @property
    def vocabulary(self) -> int:
        """Token ids of the model; vLLM checks none where it has no tokenizer."""
        return int(self._engine.model_config.get_vocab_size())

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished."""
        return bool(self._requests)

    def admit(self, key: int, request: GenerationRequest, max_tokens: int) -> None:
        """Add a request under the salt of the current weights."""
        sampling = _sampling(request.temperature, max_tokens, request.stop_token_ids)
        self._requests.add(key, request.token_ids, sampling, salt=self._salt)

    def cancel(self, keys: list[int]) -> None:
        """Drop requests; unknown keys are ignored."""
        self._requests.drop(keys)

    def begin_probe(self, key: int, token_ids: tuple[int, ...]) -> None:
        """Ask for the log-probs of a prompt: vLLM then computes all of it, cached prefix or not."""
        self._requests.add(key, token_ids, _probe_sampling(), salt=self._salt)

    def step(self) -> Iterable[Sampled]:
        """Run one step of vLLM's scheduler, or collect what the other process made."""
        return self._requests.step()

    def pause(self) -> Iterable[Sampled]:
        """Stop the scheduler with its requests and KV kept; collect what is on its way."""
        self._engine.sleep(level=0, mode="keep")
        if not self._options.in_process:
            # The answer to the call above came behind all outputs, and through the same socket.
            while has_outputs(self._engine):
                yield from self.step()

    def prepare(self, staged: StagedWeights) -> bool:
        """Fill the shadow copy; without one, refuse a bad file while the old weights are whole.

        Returns:
            True with a shadow copy; else `is_prepared` asks the workers.

        Raises:
            WeightsError: The file is not a whole version of this model, or was overwritten.
        """
        if self._shadow is not None:
            self._shadow.fill(staged)
            return True
        _refuse_bad_file(staged)
        return False

    def is_prepared(self, staged: StagedWeights) -> bool:
        """Return whether all workers are ready; the first call makes them open the file.

        Raises:
            WeightsError: A worker refuses the file.
        """
        answers = self._rpc("nyala_prepare", update=_version_file(staged))
        workers = [convert(answer, PreparationState) for answer in answers]
        if faults := {worker.fault for worker in workers if worker.fault}:
            raise WeightsError("; ".join(sorted(faults)))
        way = "; ".join(sorted({worker.way for worker in workers}))
        if way != self._way:
            log.info("new weights are loaded between two steps", way=way)
            self._way = way
        return all(worker.is_ready for worker in workers)

    def load(self, staged: StagedWeights) -> None:
        """Exchange weights and shadow, or let the workers write over theirs.

        Raises:
            WeightsOverwritten: The file changed while workers read it; the model is a mixture.
        """
        if self._shadow is not None:
            self._shadow.exchange()
        else:
            self._rpc("nyala_load")
            staged.check_not_overwritten()  # all workers have read their parts
        self._num_swaps += 1
        if self._options.recompute_kv:
            # Running requests go back into the queue, with all their tokens as their prompt.
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._requests.begin_again(salt=self._salt)

    def read_back(
        self, staged: StagedWeights, moved: Callable[[], object] = lambda: None
    ) -> list[str] | None:
        """Compare the file with the model in this process, or with the part of every worker.

        Returns:
            Names of the parameters that differ; None where a model or worker cannot be read.

        Raises:
            WeightsError: The file cannot be read.
        """
        if self._shadow is None:
            return self._read_back_in_workers(staged)
        manifest = staged.manifest
        tensors = named_tensors(staged.path, manifest.tensors, manifest.num_bytes)
        return self._shadow.read_back(dict(tensors), moved)

    def resume(self) -> None:
        """Let the scheduler run again."""
        self._engine.wake_up(tags=["scheduling"])

    def check_health(self) -> None:
        """Look at the process of the core, if it has one.

        Raises:
            EngineDied: it has ended.
        """
        if self._watch is not None:
            self._watch.check_processes()

    def rest(self) -> Iterable[Sampled]:
        """Return what the core had handed over before it died, to the last token."""
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - vLLM

        if self._watch is None:
            return
        self._watch.settle()
        with suppress(EngineDeadError):
            while has_outputs(self._engine):
                yield from self.step()

    def kill(self) -> None:
        """End a core in another process; one in this process cannot be ended."""
        if self._watch is not None:
            self._watch.kill()

    def close(self) -> None:
        """Stop vLLM's core and its processes."""
        if self._watch is not None:
            self._watch.close()
        if hasattr(self, "_engine"):
            shut_down(self._engine)
            del self._engine

    def _read_back_in_workers(self, staged: StagedWeights) -> list[str] | None:
        _refuse_bad_file(staged)
        stale: set[str] = set()
        for names in self._rpc("nyala_read_back", update=_version_file(staged)):
            if names is None:
                return None
            stale |= set(names)
        return sorted(stale)

    @property
    def _salt(self) -> str:
        return str(self._num_swaps)

    def _rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of `WorkerCalls` in every worker."""
        answers: list[Any] = self._engine.collective_rpc(method, kwargs=kwargs)
        return answers


def _version_file(staged: StagedWeights) -> dict[str, Any]:
    manifest = staged.manifest
    place = VersionFile(str(staged.path), manifest.num_bytes, manifest.tensors)
    update: dict[str, Any] = to_builtins(place)
    return update


def _refuse_bad_file(staged: StagedWeights) -> None:
    manifest = staged.manifest
    for _ in named_tensors(staged.path, manifest.tensors, manifest.num_bytes):
        pass


@lru_cache(maxsize=1024)
def _sampling(
    temperature: float, max_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Make the parameters that requests share; vLLM takes longer to make them than to read them."""
    from vllm import SamplingParams  # noqa: PLC0415 - vLLM

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # only the request decides where it ends
        logprobs=0,
        detokenize=False,
        watermarking=False,
    )


@lru_cache(maxsize=1)
def _probe_sampling() -> SamplingParams:
    from vllm import SamplingParams  # noqa: PLC0415 - vLLM

    return SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
