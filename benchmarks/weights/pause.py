"""Pauses of generation for new weights: ours, and a blocking broadcast.

Blocking is what a trainer does that sends parameter after parameter into a stopped engine: for each
one a message with its name, a broadcast of it, and a load. The message goes through a pipe and not
through HTTP, so this arm is faster than most of its kind. Both arms run the same engine under the
same requests, in processes of their own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # re-exported, but not for type checkers
from torch.distributed import ProcessGroupGloo

from actors.engine.engine import GenerationRequest
from actors.engine.threaded import ThreadedEngine
from benchmarks.weights.ring import FORKS, WeightRing
from broker.protocol.manifest import Probe

NUM_REQUESTS = 16
VOCABULARY = 4096
MAX_TOKENS = 200
STEPS_BETWEEN = 20
TIMEOUT_S = 300.0


def our_pauses(
    folder: Path, engine: str, width: int, layers: int, *, updates: int
) -> tuple[list[float], int]:
    """Publish to a running actor; returns its pauses in seconds, and the bytes of a version."""
    model = _save_model(folder / "model", width, layers)
    make = partial(_generating, engine, folder / "model")
    ring = WeightRing(folder, model, engine=make, probe=_probe)
    try:
        seconds = [ring.pause() for _ in range(updates + 1)][1:]
    finally:
        ring.close()
    return seconds, sum(p.numel() * p.element_size() for p in model.parameters())


def blocking_pauses(model: Path, engine: str, *, updates: int) -> tuple[list[float], list[float]]:
    """Send into the stopped engine; returns pauses and the time of single decode steps, seconds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    news, announced = FORKS.Pipe()
    ours, theirs = FORKS.Pipe()
    trainer = FORKS.Process(target=_send, args=(model, port, announced, updates + 1), daemon=True)
    actor = FORKS.Process(
        target=_generate_and_block, args=(engine, model, port, news, theirs), daemon=True
    )
    for process in (trainer, actor):
        process.start()
    assert ours.poll(TIMEOUT_S), "the blocking arm did not end"
    pauses, steps = ours.recv()
    for process in (trainer, actor):
        process.join(30.0)
    return pauses[1:], steps


class _Generating(ThreadedEngine):
    """An engine that always has the same number of requests running."""

    async def generate(self) -> None:
        numbers = count()
        self.submit([_request(next(numbers)) for _ in range(NUM_REQUESTS)])
        while True:
            ended = [d for d in await self.deltas() if d.finish_reason is not None]
            self.submit([_request(next(numbers)) for _ in ended])


async def _generating(engine: str, model: Path) -> _Generating:
    generating = _Generating(_stepper(engine, model), max_model_len=256)
    await generating.start()
    return generating


def _stepper(engine: str, model: Path) -> Any:
    if engine == "torch":
        from actors.engine.torch_engine import TorchOptions, TorchStepper

        return TorchStepper(TorchOptions(str(model), max_model_len=256, max_concurrent=32))
    from actors.engine.vllm_engine import VllmStepper
    from actors.engine.vllm_options import VllmOptions

    return VllmStepper(VllmOptions(str(model), max_model_len=256, max_concurrent=32))


def _request(number: int) -> GenerationRequest:
    token_ids = tuple(2 + (number * 7 + i) % (VOCABULARY - 2) for i in range(16))
    return GenerationRequest(str(number), token_ids, MAX_TOKENS, 1.0, ())


def _send(model: Path, port: int, announced: Connection, updates: int) -> None:
    """Be the trainer: at each request send all parameters, one after the other."""
    parameters = [p.detach() for _, p in _load(model).named_parameters()]
    names = [name for name, _ in _load(model).named_parameters()]
    group = _join(0, port)
    for _ in range(updates):
        announced.recv()
        for name, parameter in zip(names, parameters, strict=True):
            announced.send({"name": name, "dtype": "float32", "shape": list(parameter.shape)})
            group.broadcast(parameter, 0).wait()
        announced.send(None)
    announced.send("end")


def _generate_and_block(
    engine: str, model: Path, port: int, news: Connection, results: Connection
) -> None:
    stepper = _stepper(engine, model)
    stepper.start()
    group = _join(1, port)
    keys, pauses, steps = count(1), [], []
    while True:
        for _ in range(STEPS_BETWEEN):
            for _ in range(NUM_REQUESTS * (not stepper.has_work)):
                key = next(keys)
                stepper.admit(key, _request(key), MAX_TOKENS)
            began = time.perf_counter()
            list(stepper.step())
            steps.append(time.perf_counter() - began)
        if news.poll() and news.recv() == "end":
            break
        began = time.perf_counter()
        stepper.pause()
        news.send("go")
        _load_into(engine, stepper, _parameters(news, group))
        stepper.resume()
        pauses.append(time.perf_counter() - began)
        time.sleep(0.05)  # the trainer says whether there is more
    results.send((pauses, steps))


def _parameters(news: Connection, group: Any) -> Iterator[tuple[str, Tensor]]:
    while (entry := news.recv()) is not None:
        parameter = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        group.broadcast(parameter, 0).wait()
        yield entry["name"], parameter


@torch.no_grad()
def _load_into(engine: str, stepper: Any, parameters: Iterator[tuple[str, Tensor]]) -> None:
    if engine == "torch":
        own = dict(stepper._model.named_parameters())
        for name, parameter in parameters:
            own[name].copy_(parameter)
        return
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    worker = stepper._engine.model_executor.driver_worker.worker
    model = worker.model_runner.model
    initialize_layerwise_reload(model)
    for name, parameter in parameters:
        model.load_weights([(name, parameter)])
    finalize_layerwise_reload(model, worker.model_runner.model_config)


def _join(rank: int, port: int) -> Any:
    """Make a group of two; not the default one, which is vLLM's."""
    store = TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=TIMEOUT_S))
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return gloo(store, rank, 2, options)


def _save_model(path: Path, width: int, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return model


def _load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)


@torch.no_grad()
def _probe(model: Any) -> Probe:
    token_ids = (1, 2)
    logits_TV = model(torch.tensor([token_ids])).logits[0, :-1]
    targets_T1 = torch.tensor(token_ids[1:])[:, None]
    logprobs: list[float] = logits_TV.log_softmax(-1).gather(-1, targets_T1)[:, 0].tolist()
    return Probe(token_ids, tuple(logprobs))
