"""Prompts that are messages: from the environment through the template to the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.chat import ChatMessage, read_prompt
from actors.engine.tokenizer import ModelTokenizer
from actors.environments.calls import drive
from actors.episodes.maker import EpisodeMaker
from actors.episodes.rollout import State
from actors.rewards.process import RewardProcess
from broker.protocol.messages import Lease, TaskSpec
from buffer.record.episode import PolicyVersion
from configs.errors import SettingsError
from configs.settings import RunSettings
from tests.actors.support.fake_engine import sample
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer
from tests.actors.support.scripted_talk import Talk

QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "7+8="}]
MISTRAL = (  # its system prompt stands in the last of the user's turns
    "{% if messages[0].role == 'system' %}{% set said = messages[0].content %}{% endif %}<s>"
    "{% for m in messages %}{% if m.role == 'user' %}[ "
    "{% if loop.last and said is defined %}{{ said }} {% endif %}{{ m.content }} ]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_messages_are_rendered_as_the_template_renders_them(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML))
    few: list[dict[str, Any]] = [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4", "tool_calls": None},
        {"role": "user", "content": "7+8="},
    ]

    assert tokenizer.decode(tokenizer.encode_prompt(read_prompt(few))) == (
        "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n7+8=<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_datasets_own_system_message_takes_the_place_of_the_runs(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML), system_prompt="go on")

    own = tokenizer.decode(tokenizer.encode_prompt(read_prompt(QUESTION)))
    other = tokenizer.decode(tokenizer.encode_prompt(read_prompt(QUESTION[1:])))

    assert own.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n7+8=")
    assert "go on" not in own
    assert other.startswith("<|im_start|>system\ngo on<|im_end|>\n<|im_start|>user\n7+8=")


def test_an_observation_does_not_repeat_the_system_prompt(tmp_path):
    folder = save_tokenizer(tmp_path, template=MISTRAL, end="</s>")
    tokenizer = ModelTokenizer(folder, system_prompt="be brief")

    assert tokenizer.decode(tokenizer.encode_prompt("7+8=")) == "<s>[ be brief 7+8= ]"
    assert tokenizer.decode(tokenizer.encode_observation("24;")) == "[ 24; ]"


@pytest.mark.parametrize("template", [None, MISTRAL])
def test_an_observation_has_the_tokens_it_has_in_the_whole_conversation(tmp_path, template):
    """Tokenizers of the SentencePiece kind put a space before what begins a text."""
    words = ["▁[", "▁]", "▁24;", "24;", "▁be", "▁brief", "▁15", "▁", "[", "</s>", "<s>", "?"]
    core = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    special = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "?"}
    fast = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)
    fast.save_pretrained(str(tmp_path))
    tokenizer = ModelTokenizer(str(tmp_path))
    said = "<s>[ be ] 15</s>" if template else "be</s>"

    observation = tokenizer.encode_observation("24;")

    whole = fast.encode(said + ("[ 24; ]" if template else "24;"), add_special_tokens=False)
    assert list(observation) == whole[whole.index(words.index("</s>")) + 1 :]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [*QUESTION, {"role": "assistant", "content": "15"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user", "content": "7", "tool_calls": [1]}],
        ["7+8="],
        [{"role": "user", "content": 7}],
    ],
)
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(SettingsError, match="the prompt of an item must"):
        read_prompt(prompt)


def test_a_model_without_a_template_takes_no_messages(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path))

    with pytest.raises(SettingsError, match=r"run.model must have a chat template for messages"):
        tokenizer.encode_prompt(read_prompt(QUESTION))


def _next(tokens: Iterator[int], _: tuple[int, ...]) -> int:
    return next(tokens)


class Guess(Talk):
    """A conversation that begins with messages and goes on after a wrong answer."""

    def begin(self, index: int, seed: int, *, held_out: bool) -> Guess:
        return Guess(QUESTION, "no")  # type: ignore[arg-type]

    def describe(self) -> str:
        return "guess"


REWARD = """
def trl(prompts, completions, **kwargs):
    assert prompts[0][-1] == {"role": "user", "content": "7+8="}, prompts
    assert [m["role"] for m in completions[0]] == ["assistant", "user", "assistant"], completions
    return [float(c[0]["content"] == "14" and c[-1]["content"] == "15") for c in completions]

def openrlhf(queries, prompts, labels):
    return [float(q[len(p):].startswith("14") and "7+8=" in p) for q, p in zip(queries, prompts)]

def verl(data_source, solution_str, ground_truth):
    return float(solution_str.endswith("15"))

def plain(completion, prompt):
    return float(isinstance(prompt, str) and completion.endswith("15"))
"""


@pytest.mark.parametrize("name", ["trl", "openrlhf", "verl", "plain"])
def test_rewards_get_messages_where_their_project_has_them_and_text_elsewhere(tmp_path, name):
    folder = save_tokenizer(tmp_path, template=CHATML)
    tokenizer = ModelTokenizer(folder)
    run = RunSettings(model=folder, max_completion_tokens=64)
    maker = EpisodeMaker(tokenizer, run, "actor")
    spec = TaskSpec(group_id=0, index=0, seed=0, purpose="train", temperature=1.0)
    (tmp_path / "rewards.py").write_text(REWARD)

    rollout = drive(maker.begin_episode(Lease(1, 1, spec, 0), Guess("")))
    for answer in ("14", "15"):
        tokens = iter([*tokenizer._encode(answer), *tokenizer.stop_token_ids])
        policy = partial(_next, tokens)
        rollout.append_delta(sample(policy, rollout.request(), PolicyVersion(1, 1)))
        rollout.settle(drive(rollout.judge()))
    assert rollout.state is State.FINISHED
    assert rollout.turns == [
        ChatMessage("assistant", "14"),
        ChatMessage("user", "no"),
        ChatMessage("assistant", "15"),
    ]

    async def score():
        process = RewardProcess(f"{tmp_path}/rewards.py:{name}", timeout_s=20)
        await process.start()
        try:
            return await process.score([maker.sample(rollout)])
        finally:
            await process.close()

    assert asyncio.run(score()) == [1.0]
