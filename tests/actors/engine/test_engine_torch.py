"""The torch engine passes the battery of engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import torch

from actors.engine import torch_engine as torch_engine_module
from actors.engine.engine import GenerationRequest
from actors.engine.threaded import ThreadedEngine
from actors.engine.torch_engine import TorchOptions, TorchStepper, torch_engine
from actors.engine.wire_tensors import named_tensors
from buffer.record.episode import PolicyVersion
from configs.errors import EngineError, WeightsError
from learner.model.output_layer import output_layer, score_tokens, softmax_of
from learner.model.policy import Policy, probe_logprobs
from learner.model.saved_model import load_causal_lm
from tests.actors.support.engine_battery import (
    BATTERY,
    TOLERANCE,
    probe_agrees,
    recomputes_kv,
    swaps_under_load,
)
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.actors.support.stale_tensors import lagging
from tests.actors.support.tiny_model import make_model, reference_logprobs, stage
from tests.learner.support.random_models import save_random_model


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def bench(runner, tmp_path_factory) -> Iterator[Bench]:
    bench = runner.run(open_bench(tmp_path_factory.mktemp("tied"), tied=True))
    yield bench
    runner.run(bench.engine.close())


async def open_bench(folder: Path, *, tied: bool, recompute_kv: bool = False) -> Bench:
    model = tiny_folder(folder / "model", tied=tied)
    # Fewer rows than the battery has requests: admission and row moves are part of it.
    options = TorchOptions(
        str(folder / "model"), max_model_len=256, max_concurrent=24, recompute_kv=recompute_kv
    )
    engine = torch_engine(options)
    await engine.start()
    return Bench(engine, model, folder)


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_torch_engine(check: Callable[[Bench], Coroutine], bench: Bench, runner: asyncio.Runner):
    runner.run(check(bench))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_that_lags_by_a_step_is_read_back(tmp_path, dtype):
    model = tiny_folder(tmp_path / "model", tied=True)
    stepper = TorchStepper(TorchOptions(str(tmp_path / "model"), max_model_len=64, dtype=dtype))
    stepper.start()
    staged = stage(model, tmp_path / "weights", PolicyVersion(0, 1), dtype=dtype)
    manifest = staged.manifest
    tensors = dict(named_tensors(staged.path, manifest.tensors, manifest.num_bytes))

    for name, behind in lagging(tensors, count=200):
        for each, value in behind.items():
            stepper._parameters[each].data.copy_(value)
        assert stepper.read_back(staged) == [name]

    stepper.prepare(staged)
    stepper.load(staged)
    assert stepper.read_back(staged) == []


@pytest.mark.slow
def test_the_kv_cache_is_recomputed_where_asked(runner, tmp_path):
    async def story() -> None:
        bench = await open_bench(tmp_path, tied=True, recompute_kv=True)
        await recomputes_kv(bench)
        await bench.engine.close()

    runner.run(story())


@torch.no_grad()
@pytest.mark.parametrize("recompute_kv", [False, True])
def test_a_token_after_a_swap_is_of_the_new_weights_over_old_keys_unless_recomputed(
    tmp_path: Path, recompute_kv: bool
) -> None:
    """What `actors.kv_on_swap` changes is all of the difference to the learner's log-probs."""
    model = tiny_folder(tmp_path / "model", tied=True)
    options = TorchOptions(str(tmp_path / "model"), max_model_len=64, recompute_kv=recompute_kv)
    stepper = TorchStepper(options)
    stepper.start()
    bench = Bench(ThreadedEngine(stepper, max_model_len=64), model, tmp_path)
    request = bench.request(max_tokens=24)
    stepper.admit(0, request, request.max_tokens)

    sampled = [each for _ in range(8) for each in stepper.step()]
    staged = bench.stage_next()
    stepper.prepare(staged)
    stepper.load(staged)
    sampled += [each for _ in range(16) for each in stepper.step()]

    ids = [*request.token_ids, *(token for each in sampled for token in each.token_ids)]
    mu = torch.tensor([logprob for each in sampled for logprob in each.logprobs])[8:]
    num_old = len(request.token_ids) + 7  # the eighth goes through the layers after the swap
    old, new = (bench.models[version] for version in sorted(bench.models))
    begun = old(torch.tensor([ids[:num_old]]), use_cache=True).past_key_values
    logits = new(torch.tensor([ids[num_old:-1]]), past_key_values=begun).logits[0]
    places = torch.tensor(ids[num_old + 1 :])[:, None]
    over_old = logits.log_softmax(-1).gather(-1, places).squeeze(-1)
    pi = reference_logprobs(new, ids)[num_old:]
    assert len(mu) == len(pi) == 16
    assert (mu - (pi if recompute_kv else over_old)).abs().max() < TOLERANCE
    assert (over_old - pi).abs().max() > 0.1


@pytest.mark.slow
def test_untied_embeddings_swap_as_exactly(runner, tmp_path):
    async def story() -> None:
        bench = await open_bench(tmp_path, tied=False)
        await swaps_under_load(bench)
        await bench.engine.close()

    runner.run(story())


def test_a_swap_copies_nothing_while_generation_stands_still(tmp_path):
    model = tiny_folder(tmp_path / "model", tied=True)
    stepper = TorchStepper(TorchOptions(str(tmp_path / "model"), max_model_len=64))
    stepper.start()
    bench = Bench(ThreadedEngine(stepper, max_model_len=64), model, tmp_path)
    parameters = dict(stepper._model.named_parameters())

    for _ in range(3):
        serving = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        staged = bench.stage_next()
        stepper.prepare(staged)
        assert {name: p.data_ptr() for name, p in parameters.items()} == serving
        ready = {name: tensor.data_ptr() for name, tensor in stepper._shadow.items()}

        stepper.load(staged)

        assert {name: p.data_ptr() for name, p in parameters.items()} == ready
        expected = dict(bench.models[staged.manifest.version].named_parameters())
        assert all(torch.equal(p, expected[name]) for name, p in parameters.items())


def test_a_version_of_another_model_is_refused_and_the_old_weights_go_on(runner, tmp_path):
    async def story() -> None:
        bench = await open_bench(tmp_path, tied=True)
        other = make_model(layers=3)
        with pytest.raises(WeightsError, match=r"got a difference in .*layers\.2"):
            await bench.engine.apply(stage(other, tmp_path / "other", PolicyVersion(0, 9)))
        await probe_agrees(bench)
        await bench.engine.close()

    runner.run(story())


def test_torch_engine_starts_in_seconds(runner, tmp_path):
    begun = time.process_time()  # of this process: the wall clock of a shared machine says little

    bench = runner.run(open_bench(tmp_path, tied=True))

    assert time.process_time() - begun < 3
    runner.run(bench.engine.close())


def test_death_of_the_engine_reaches_every_waiter(runner, tmp_path, monkeypatch):
    tiny_folder(tmp_path, tied=True)
    stepper = TorchStepper(TorchOptions(str(tmp_path), max_model_len=64))
    engine = ThreadedEngine(stepper, max_model_len=64)

    async def story() -> None:
        await engine.start()
        monkeypatch.setattr(stepper, "begin_probe", _raise)
        reader = asyncio.create_task(engine.deltas())
        with pytest.raises(EngineError, match="out of order"):
            await engine.probe((1, 2, 3))
        with pytest.raises(EngineError, match="the engine died"):
            await reader
        with pytest.raises(EngineError, match="the engine died"):
            engine.submit([])

    runner.run(story())


def test_engine_that_cannot_load_says_so(runner, tmp_path):
    engine = torch_engine(TorchOptions(str(tmp_path / "no-model"), max_model_len=64))

    with pytest.raises(EngineError, match="no-model"):
        runner.run(engine.start())


def test_bfloat16_engine_answers_a_probe(runner, tmp_path):
    model = tiny_folder(tmp_path, tied=True)
    engine = torch_engine(TorchOptions(str(tmp_path), max_model_len=64, dtype="bfloat16"))

    async def story() -> torch.Tensor:
        await engine.start()
        answer = await engine.probe((5, 6, 7, 8))
        await engine.close()
        return torch.tensor(answer)

    answer = runner.run(story())
    bench = Bench(engine, model, tmp_path)
    expected = model(torch.tensor([[5, 6, 7, 8]])).logits[0, :-1].log_softmax(-1)
    assert bench.model is model
    assert (answer - expected.gather(-1, torch.tensor([[6], [7], [8]]))[:, 0]).abs().max() < 1.0


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2", "cohere"])
def test_float32_logits_are_those_of_the_learner(tmp_path: Path, model_type: str) -> None:
    save_random_model(tmp_path, model_type)
    token_ids = torch.arange(5, 25)
    causal_lm = load_causal_lm(tmp_path).bfloat16()

    def difference(head_dtype: str | None) -> float:
        """Of the log-probs that both compute from the states of the engine's layers."""
        options = TorchOptions(str(tmp_path), 64, dtype="bfloat16", head_dtype=head_dtype)
        stepper = TorchStepper(options)
        stepper.start()
        with torch.no_grad():
            theirs = stepper._score(0, tuple(token_ids.tolist())).logprobs
            states_TD = stepper._model.base_model(input_ids=token_ids[None]).last_hidden_state[0]
            ours = score_tokens(
                output_layer(causal_lm),
                states_TD[:-1],
                token_ids[1:],
                softmax_of(causal_lm, temperature=1.0, dtype=torch.float32),
                entropy_gradient=False,
            )
        return float((ours.logprobs_N - torch.tensor(theirs)).abs().max())

    assert difference("float32") < 1e-5
    assert difference(None) > 1e-3


def _raise(*_: object) -> None:
    raise RuntimeError("out of order")


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gemma3_text", "cohere2"])
def test_a_sampled_token_has_the_log_prob_that_the_learner_computes(
    runner: asyncio.Runner, tmp_path: Path, model_type: str
) -> None:
    """With windows of four tokens, and a cap that only eager attention applies."""
    save_random_model(tmp_path, model_type, sliding_window=4)
    policy = Policy(load_causal_lm(tmp_path), temperature=1.0)

    async def story() -> None:
        engine = torch_engine(TorchOptions(str(tmp_path), max_model_len=64, max_concurrent=4))
        await engine.start()
        bench = Bench(engine, make_model(), tmp_path)
        requests = [
            GenerationRequest(f"{n}", tuple(range(5, 11 + n)), 20, 1.0, ()) for n in range(6)
        ]
        transcripts = bench.submit(*requests)
        await bench.finish(transcripts)
        for transcript in transcripts:
            token_ids = transcript.request.token_ids + tuple(transcript.token_ids)
            expected = probe_logprobs(policy, token_ids)[-20:]
            assert transcript.logprobs == pytest.approx(expected, abs=1e-4)
        await engine.close()

    runner.run(story())


def test_a_prompt_that_is_read_in_parts_is_continued_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_folder(tmp_path / "model", tied=True)
    options = TorchOptions(str(tmp_path / "model"), max_model_len=64, max_concurrent=2)
    prompts = ((5, 6, 7, 8, 9, 10, 11, 12), (9, 9, 9, 4, 4, 4, 5, 6))
    found = []
    for size in (torch_engine_module.READ_TOKENS, 3):
        monkeypatch.setattr(torch_engine_module, "READ_TOKENS", size)
        stepper = TorchStepper(options)
        stepper.start()
        for key, prompt in enumerate(prompts):
            stepper.admit(key, GenerationRequest(str(key), prompt, 4, 0.0, (1,)), 4)
        sampled = [each for _ in range(4) for each in stepper.step()]
        found.append(
            {key: [(s.token_ids, s.logprobs) for s in sampled if s.key == key] for key in (0, 1)}
        )

    whole, parts = found
    for key in (0, 1):
        assert [tokens for tokens, _ in parts[key]] == [tokens for tokens, _ in whole[key]]
        for (_, ours), (_, theirs) in zip(parts[key], whole[key], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
