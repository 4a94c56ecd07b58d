"""Every architecture in vLLM and in the small engine: log-probs equal the learner's.

Run beside CI, `pytest tests/system/architectures.py`: vLLM starts once for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from actors.engine.engine import Engine
from actors.engine.tokenizer import ModelTokenizer
from actors.engine.torch_engine import TorchOptions, torch_engine
from actors.engine.vllm_engine import vllm_engine
from actors.engine.vllm_options import VllmOptions
from actors.episodes.maker import EpisodeMaker
from actors.episodes.play import finish
from actors.episodes.rollout import Rollout
from broker.protocol.messages import Lease, TaskSpec
from configs.architecture import WINDOWS_DIFFER
from configs.settings import RunSettings
from learner.model.policy import Policy, probe_logprobs
from learner.model.saved_model import load_causal_lm
from tests.actors.support.saved_tokenizer import save_tokenizer
from tests.actors.support.scripted_talk import Talk
from tests.learner.support.random_models import ARCHITECTURES, save_random_model

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of themselves

TOLERANCE = 1e-4
TOKENS = tuple(torch.randint(3, 48, (60,), generator=torch.Generator().manual_seed(0)).tolist())
EPISODES = 48
LENGTH = 128


class Form(NamedTuple):
    """The form of a family's chat template: each turn is start, role, middle, content, end."""

    start: str
    middle: str
    end: str
    assistant: str = "assistant"

    @property
    def template(self) -> str:
        """The form in Jinja."""
        start = repr(self.start) + " + {'assistant': '" + self.assistant + "'}.get(m, m)"
        turn = "{{ start(m.role) }}{{ m.content }}" + self.end
        return (
            "{% macro start(m) %}{{ " + start + " }}" + self.middle + "{% endmacro %}"
            "{% for m in messages %}" + turn + "{% endfor %}"
            "{% if add_generation_prompt %}{{ start('assistant') }}{% endif %}"
        )

    @property
    def special(self) -> list[str]:
        """Its special tokens."""
        return [text.strip() for text in (self.start, self.middle, self.end) if text.strip()]


CHATML = Form("<|im_start|>", "\n", "<|im_end|>\n")
GEMMA = Form("<start_of_turn>", "\n", "<end_of_turn>\n", assistant="model")
COHERE = Form("<|START_OF_TURN_TOKEN|>", "<|ROLE_END|>", "<|END_OF_TURN_TOKEN|>")
FORMS = {
    "llama": Form("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral": Form("[INST]", "[/INST]", "</s>"),
    "phi3": Form("<|start|>", "\n", "<|end|>\n"),
    "granite": Form("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"),
} | dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GEMMA)
FORMS |= dict.fromkeys(("cohere", "cohere2"), COHERE)


@pytest.fixture(scope="module")
def learner() -> Iterator[ProcessPoolExecutor]:
    """A process without vLLM, which changes some of transformers' classes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as learner:
        yield learner


@pytest.mark.parametrize("kind", ["torch", "vllm"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_engine_samples_two_turns_as_the_learner_scores_them(
    tmp_path: Path, learner: ProcessPoolExecutor, model_type: str, kind: str
) -> None:
    form = FORMS.get(model_type, CHATML)
    save_tokenizer(tmp_path, template=form.template, end="<eos>", special=["<eos>", *form.special])
    tokenizer = ModelTokenizer(str(tmp_path))
    size = len(tokenizer._tokenizer)
    changes = {"sliding_window": LENGTH} if model_type in WINDOWS_DIFFER else {}
    learner.submit(
        save_random_model,
        tmp_path,
        model_type,
        vocab_size=size,
        initializer_range=0.1,
        eos_token_id=None,
        **changes,
    ).result()
    observation = tokenizer.encode_observation("no")
    end = tokenizer._tokenizer.convert_tokens_to_ids(form.end.strip())

    probed, rollouts = asyncio.run(_sample(kind, str(tmp_path), tokenizer))

    texts = [(*r.prompt_ids, *r.completion().token_ids.tolist()) for r in rollouts]
    expected, *scores = learner.submit(_score, tmp_path, [TOKENS, *texts]).result()
    assert list(probed) == pytest.approx(expected, abs=TOLERANCE)
    for rollout, expected in zip(rollouts, scores, strict=True):
        completion = rollout.completion()
        sampled = completion.loss_mask.astype(bool)
        assert sampled.sum() == rollout.length - (rollout.num_turns - 1) * len(observation)
        of_completion = np.array(expected[len(rollout.prompt_ids) - 1 :])
        assert completion.behaviour_logprobs[sampled].tolist() == pytest.approx(
            of_completion[sampled].tolist(), abs=TOLERANCE
        )
    both = [r for r in rollouts if r.num_turns == 2 and r.finish_reason == "stop"]
    turns = [turn for rollout in both for turn in _sampled_turns(rollout)]
    assert {turn[-1] for turn in turns} == set(tokenizer.stop_token_ids)
    assert end in tokenizer.stop_token_ids
    assert not any(token in tokenizer.stop_token_ids for turn in turns for token in turn[:-1])


def _score(folder: Path, texts: list[tuple[int, ...]]) -> list[list[float]]:
    policy = Policy(load_causal_lm(folder), temperature=1.0)
    return [probe_logprobs(policy, token_ids) for token_ids in texts]


def _sampled_turns(rollout: Rollout) -> list[list[int]]:
    """The sampled tokens of each turn."""
    completion = rollout.completion()
    borders = np.flatnonzero(np.diff(completion.loss_mask.astype(int))) + 1
    pieces = np.split(completion.token_ids, borders)
    return [piece.tolist() for piece in pieces[::2]]


async def _sample(
    kind: str, model: str, tokenizer: ModelTokenizer
) -> tuple[tuple[float, ...], list[Rollout]]:
    maker = EpisodeMaker(tokenizer, RunSettings(model=model, max_completion_tokens=90), "actor")
    engine = _engine(kind, model)
    await engine.start()
    try:
        rollouts = [
            await maker.begin_episode(Lease(number, 1, _spec(number), 0), Ask())
            for number in range(EPISODES)
        ]
        await finish(engine, rollouts)
        return await engine.probe(TOKENS), rollouts
    finally:
        await engine.close()


def _engine(kind: str, model: str) -> Engine:
    if kind == "vllm":
        return vllm_engine(VllmOptions(model, max_model_len=LENGTH, max_concurrent=4))
    return torch_engine(TorchOptions(model, max_model_len=LENGTH, max_concurrent=4))


def _spec(index: int) -> TaskSpec:
    return TaskSpec(group_id=index, index=index, seed=index, purpose="train", temperature=1.0)


class Ask:
    """Conversations of two turns."""

    def begin(self, index: int, seed: int, *, held_out: bool) -> Talk:
        """Ask, and answer the first turn."""
        return Talk("7+8=", "no")

    def describe(self) -> str:
        """Nothing depends on it."""
        return "ask"
