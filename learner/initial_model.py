"""Small initial models for runs without a pretrained one: made, then warm-started on pairs.

Run by `python -m learner warm-start`, which the console starts where `run.model` has to be made.
"""

from __future__ import annotations

import json
import string
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from configs.errors import SettingsError, quoted
from configs.settings import LearnerSettings
from learner.algorithm.microbatch import Sequences
from learner.data.dealing import deal
from learner.model.policy import Policy
from learner.training.optimizer import Schedule, ScheduledOptimizer

# --------------------------------------------------------------------------------------------------
# A character-level Qwen3 small enough to train on a laptop, and its tokenizer.
#
# Owns the shape of the model and the alphabet. One character is one token without merges, so
# text -> tokens -> text is exact and the tokens of a turn do not depend on the text around it.

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# Every printable ASCII character has a token, so that other tasks can reuse the model.
ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL_FRAME = ('<tool_call>{"name": "', '", "arguments": {', "}}</tool_call>")
"""What every call has around its name and its arguments, a token each."""
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template of a small model: functions are shown by their names, as long prompts take time on
a CPU, and calls are written as Qwen3 writes them."""
HEAD_WIDTH = 32  # the narrowest head that the CPU attention of vLLM accepts
MAX_POSITIONS = 4096


def make_tokenizer(
    texts: Iterable[str], *, tools: Iterable[Mapping[str, Any]] | None = None
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each printable ASCII character and each one in `texts`.

    Args:
        texts: Texts whose characters it has.
        tools: Functions that live agents offer: it then has a chat template, and tokens for roles,
            names of functions and of their arguments, and what every call has around them.
    """
    extra = sorted({character for text in texts for character in text} - set(ALPHABET))
    vocabulary = {
        token: token_id for token_id, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET, *extra])
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # joins without spaces
    if tools is not None:
        tokenizer.add_special_tokens([AddedToken(role, normalized=False) for role in ROLES])
        parts = [*CALL_FRAME, *sorted({part for tool in tools for part in _call_parts(tool)})]
        tokenizer.add_tokens([AddedToken(part, normalized=False) for part in parts])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        chat_template=None if tools is None else CHAT_TEMPLATE,
    )


def _call_parts(tool: Mapping[str, Any]) -> Iterator[str]:
    """Yield a function's name, and its arguments as calls write them."""
    function = tool["function"]
    yield function["name"]
    for argument in function.get("parameters", {}).get("properties", ()):
        yield f"{json.dumps(argument)}: "


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of a token of this vocabulary."""
    number = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(number, int)
    return number


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, layers: int, width: int, tied: bool, seed: int
) -> Qwen3ForCausalLM:
    """Make a Qwen3 with random weights: heads 32 wide, half as many for keys and values.

    Seeds torch's random number generators of this process.

    Raises:
        SettingsError: `width` is not a multiple of 64.
    """
    if width % (2 * HEAD_WIDTH):
        raise SettingsError(
            f"learner.init_width must be a multiple of {2 * HEAD_WIDTH}, got {width}; set it to "
            f"{max(1, width // (2 * HEAD_WIDTH)) * 2 * HEAD_WIDTH}: heads are {HEAD_WIDTH} wide "
            "and come in pairs"
        )
    heads = width // HEAD_WIDTH
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        pad_token_id=token_id(tokenizer, PAD),
        eos_token_id=token_id(tokenizer, EOS),
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


# --------------------------------------------------------------------------------------------------
# Warm start: a character model trained on prompt/answer pairs (`python -m learner warm-start`).
#
# Consumes a file of JSON lines `{"prompt": str, "segments": [[text, trained], ...]}`, or for live
# agents `{"messages": [...], "tools": [...]}`, and leaves a Hugging Face directory with model and
# tokenizer. An end-of-text token follows every trained segment, or turn of the assistant, and is
# trained too. Prints one JSON line for each step, for a progress bar.

REPORT_EVERY_S = 0.2  # a progress bar redraws no faster


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the segments that follow it: (text, trained)."""

    prompt: str
    segments: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """The text of the pair, prompt and segments together."""
        return self.prompt + "".join(text for text, _ in self.segments)


@dataclass(frozen=True, slots=True)
class ChatPair:
    """A chat whose assistant is imitated, and the functions that it may call."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def text(self) -> str:
        """All characters of the chat."""
        return json.dumps([self.messages, self.tools], ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A pair in tokens; `trained[t]` is True where token t is a target."""

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]


def read_pairs(path: Path) -> list[Pair | ChatPair]:
    """Read a file of pairs.

    Raises:
        SettingsError: The file cannot be read, is empty, or a line is not a pair; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise SettingsError(
            f"--pairs must be a readable file in UTF-8, got {path} ({reason}); name such a file "
            "that this user can read"
        ) from error
    pairs: list[Pair | ChatPair] = []
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
            if "messages" in fields:
                pairs.append(ChatPair(list(fields["messages"]), list(fields["tools"])))
                continue
            segments = tuple((str(text), bool(trained)) for text, trained in fields["segments"])
            pairs.append(Pair(prompt=str(fields["prompt"]), segments=segments))
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f'--pairs must have {{"prompt": ..., "segments": [[text, trained], ...]}} on each '
                f"line, got {quoted(line)} on line {number} of {path} ({error}); mend that line"
            ) from error
    if not pairs:
        raise SettingsError(
            f"--pairs must hold at least one pair, got an empty file {path}; write one pair a "
            "line, or name another file"
        )
    return pairs


def echo(pair: Pair | ChatPair) -> Pair:
    """Return the pair whose answer is its own prompt, without the prompt's last character.

    Raises:
        SettingsError: The pair is a chat, or has more or fewer segments than one answer.
    """
    if isinstance(pair, ChatPair) or len(pair.segments) != 1:
        kind = "a chat" if isinstance(pair, ChatPair) else f"one of {len(pair.segments)}"
        raise SettingsError(
            f"learner.warm_start_echo must be 0 unless each of --pairs has one segment, got "
            f"{kind}; set it to 0: the prompt replaces a single answer"
        )
    return Pair(pair.prompt, ((pair.prompt[:-1], True),))


def tokenize(pair: Pair | ChatPair, tokenizer: PreTrainedTokenizerFast) -> TokenPair:
    """Turn a pair into tokens, with the end token after each trained segment or turn."""
    if isinstance(pair, ChatPair):
        messages: Any = pair.messages
        tools: Any = pair.tools or None
        encoded: Any = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return TokenPair(tuple(encoded["input_ids"]), tuple(map(bool, encoded["assistant_masks"])))
    token_ids = list(tokenizer.encode(pair.prompt, add_special_tokens=False))
    trained = [False] * len(token_ids)
    for text, is_trained in pair.segments:
        segment = list(tokenizer.encode(text, add_special_tokens=False))
        if is_trained:
            segment.append(token_id(tokenizer, EOS))
        token_ids += segment
        trained += [is_trained] * len(segment)
    return TokenPair(tuple(token_ids), tuple(trained))


def warm_start(learner: LearnerSettings, *, seed: int, pairs_path: Path, out: Path) -> None:
    """Make the character model, train it on the pairs and save it to `out`.

    Prints one JSON line of progress every 0.2 s at most.

    Raises:
        SettingsError: As `read_pairs`, `make_model` and `echo` raise it.
    """
    started = time.monotonic()
    torch.set_num_threads(learner.threads)
    pairs = read_pairs(pairs_path)
    chats = [pair for pair in pairs if isinstance(pair, ChatPair)]
    tools = [tool for chat in chats for tool in chat.tools]
    tokenizer = make_tokenizer((pair.text for pair in pairs), tools=tools if chats else None)
    model = make_model(
        tokenizer,
        layers=learner.init_layers,
        width=learner.init_width,
        tied=learner.init_tied,
        seed=seed,
    )
    policy = Policy(model, temperature=1.0)
    optimizer = ScheduledOptimizer(
        policy,
        Schedule(
            peak=learner.warm_start_lr,
            warmup_steps=learner.warm_start_steps // 20,
            decay="cosine",
            min_ratio=0.1,
            steps=learner.warm_start_steps,
        ),
        learner,
    )
    answers = [tokenize(pair, tokenizer) for pair in pairs]
    echoes = [tokenize(echo(p), tokenizer) for p in pairs] if learner.warm_start_echo else answers
    random = np.random.default_rng(seed)
    reported = -REPORT_EVERY_S
    for step in range(1, learner.warm_start_steps + 1):
        chosen = random.integers(len(pairs), size=learner.warm_start_batch)
        echoed = random.random(learner.warm_start_batch) < learner.warm_start_echo
        examples = [(echoes if e else answers)[i] for i, e in zip(chosen, echoed, strict=True)]
        loss = supervised_step(policy, optimizer, examples, learner.microbatch_tokens)
        elapsed = time.monotonic() - started
        if elapsed - reported >= REPORT_EVERY_S or step == learner.warm_start_steps:
            reported = elapsed
            _report(
                step=step,
                steps=learner.warm_start_steps,
                loss=round(loss, 4),
                elapsed_s=round(elapsed, 2),
            )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def supervised_step(
    policy: Policy,
    optimizer: ScheduledOptimizer,
    pairs: list[TokenPair],
    microbatch_tokens: int,
) -> float:
    """Take one cross-entropy step on `pairs` and return the mean loss of a trained token, nats."""
    num_trained = sum(sum(pair.trained) for pair in pairs)
    total = 0.0
    lengths = [len(pair.token_ids) for pair in pairs]
    places = deal(lengths, lengths, ranks=1, microbatch_tokens=microbatch_tokens)
    for number in range(1 + max(place.microbatch for place in places)):
        rows = [row for row, place in enumerate(places) if place.microbatch == number]
        rows.sort(key=lengths.__getitem__)  # attention takes equally long neighbours together
        trained_T = np.concatenate([pairs[row].trained for row in rows])
        sequences = Sequences.from_token_ids([pairs[row].token_ids for row in rows])
        trained_T[sequences.bounds[:-1].numpy()] = False  # nothing predicts a first token
        scores = policy(sequences, torch.from_numpy(np.flatnonzero(trained_T)))
        loss = -scores.logprobs_N.sum() / max(1, num_trained)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def _report(**fields: float) -> None:
    sys.stdout.write(json.dumps({"stage": "warm-start", **fields}) + "\n")
    sys.stdout.flush()
