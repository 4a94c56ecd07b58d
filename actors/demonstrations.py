"""Export of demonstrations for supervised training: text to tokens, with the trained ones marked.

    rows of a dataset, or answers of the environment -> tokens and masks -> a folder of arrays

Rows have `messages`, of which the assistant's turns are trained, or `prompt` and `completion`, of
which the completion is. Tokens are those of the run's model as an episode has them: a prompt up to
where the policy begins its turn, a turn with the token that ends it, what follows a turn. The
chat template itself shows where each turn begins, and the first end token where it is over.

A model that `init` stands for has no tokenizer yet: it is made here of the characters of the
demonstrations, and lies beside the arrays.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from actors.chat import Prompt, read_prompt, text_of
from actors.engine.tokenizer import Chat, ModelTokenizer
from actors.environments.agent import AgentTask
from actors.environments.base import Segment, tools_of
from actors.environments.calls import call, drive, finish, needs_loop
from actors.environments.dataset.rows import JsonLinesRows, Rows, open_rows
from actors.environments.registry import call_within, make_environment
from actors.episodes.agent_chat import CallError, chat_message
from buffer.record.demonstrations import DemonstrationsWriter
from configs import durable
from configs.errors import SettingsError, quoted
from configs.settings import RunSettings, Settings

T = TypeVar("T")

TIMEOUT_S = 600.0  # a hundred thousand items take seconds; a generator may be slow, not endless
REPORT_EVERY_S = 0.2  # a progress bar redraws no faster
TOKENIZER = "tokenizer"
"""Folder of the tokenizer that was made, beside the arrays."""
FORMS = "`messages`, or `prompt` and `completion`"

# --------------------------------------------------------------------------------------------------
# Demonstrations as text, and their tokens.


class DemonstratedEpisode(NamedTuple):
    """A prompt and what follows it: turns of the policy, and observations between them."""

    prompt: Prompt
    segments: tuple[Segment, ...]
    tools: str = ""
    """Functions that the policy may call, as JSON."""

    @property
    def text(self) -> str:
        """The text of prompt and segments together."""
        return text_of(self.prompt) + "".join(segment.text for segment in self.segments)


class DemonstratedChat(NamedTuple):
    """Messages of a chat whose assistant is imitated, and the functions that it may call."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] = ()
    first: int = 0
    """Number of the first message that may be trained."""

    @property
    def text(self) -> str:
        """All characters of the chat."""
        return json.dumps([self.messages, self.tools], ensure_ascii=False)


Demonstration = DemonstratedEpisode | DemonstratedChat


class Piece(NamedTuple):
    """Neighbouring tokens that are all trained, or none of them."""

    token_ids: Sequence[int]
    is_trained: bool


def tokenize(shown: Demonstration, tokenizer: ModelTokenizer) -> Iterator[list[Piece]]:
    """Yield the rows that a demonstration makes, in pieces: one, or one for each turn of a chat.

    Raises:
        SettingsError: No turn is trained, or the chat template does not take the chat.
    """
    if isinstance(shown, DemonstratedChat):
        yield from _tokenize_chat(shown, tokenizer)
        return
    pieces = [Piece(tokenizer.encode_prompt(shown.prompt, shown.tools), False)]
    for text, is_trained in shown.segments:
        encode = tokenizer.encode_answer if is_trained else tokenizer.encode_observation
        pieces.append(Piece(encode(text), is_trained))
    yield pieces


def _tokenize_chat(chat: DemonstratedChat, tokenizer: ModelTokenizer) -> Iterator[list[Piece]]:
    """Cut what the template writes for a chat where each turn begins.

    Some templates write a turn otherwise once a later one follows it, such as without its
    reasoning. Each turn of such a chat is then a row of its own, behind what it answered.
    """
    turns = [
        number
        for number, message in enumerate(chat.messages)
        if message["role"] == "assistant" and number >= chat.first
    ]
    if not turns:
        raise SettingsError(
            "a chat must have a turn of the assistant to train on, got none; add the answer as a "
            'message with "role": "assistant", or leave the chat out'
        )
    messages = chat.messages[: turns[-1] + 1]
    prefixes = [tokenizer.render_chat(Chat(messages[:turn], chat.tools)) for turn in turns]
    whole = tokenizer.render_chat(Chat(messages, chat.tools), go_on=False)
    bounds = [*map(len, prefixes), len(whole)]
    written = [whole[begin:end] for begin, end in pairwise(bounds)]
    is_continued = all(map(whole.startswith, prefixes))
    is_kept = all(_is_in(messages[turn], text) for turn, text in zip(turns, written, strict=True))
    if len(turns) > 1 and not (is_continued and is_kept):
        for turn in turns:
            alone = DemonstratedChat(messages[: turn + 1], chat.tools, first=turn)
            yield from _tokenize_chat(alone, tokenizer)
        return
    if not is_continued:
        yield _as_sampled(prefixes[0], messages[-1], tokenizer)
        return
    pieces = [Piece(tokenizer.encode_rendered(prefixes[0]), False)]
    for number, text in enumerate(written, start=1):
        token_ids = tokenizer.encode_rendered(text, is_behind=True)
        stops = tokenizer.stop_token_ids
        if number == len(written) and not {*token_ids} & {*stops}:  # some leave the last turn open
            token_ids += stops[:1]
        over = next((at for at, token in enumerate(token_ids) if token in stops), None)
        if over is None:
            raise SettingsError(
                "run.model must have a chat template that ends each turn of the assistant with a "
                f"token of its own, got {quoted(text, 60)} for a turn; give it another "
                "chat_template, or choose another model"
            )
        pieces += [Piece(token_ids[: over + 1], True), Piece(token_ids[over + 1 :], False)]
    yield pieces


def _is_in(message: Mapping[str, Any], written: str) -> bool:
    """Whether the template has written what a turn says, and its reasoning."""
    texts = (message.get("content") or "", message.get("reasoning_content") or "")
    return all(text.strip() in written for text in texts)


def _as_sampled(before: str, message: Mapping[str, Any], tokenizer: ModelTokenizer) -> list[Piece]:
    """Put the text of a turn behind what the template writes before it, as a sampled turn is.

    So it is where a template opens the reasoning of a turn and later leaves that out.
    """
    if message.get("tool_calls"):
        raise SettingsError(
            "run.model must have a chat template that writes a turn with calls of tools behind "
            "what it writes before it, got one that writes both otherwise; leave the calls out, or "
            "choose another model"
        )
    answer = tokenizer.encode_answer(message["content"])
    return [Piece(tokenizer.encode_rendered(before), False), Piece(answer, True)]


# --------------------------------------------------------------------------------------------------
# Rows of a dataset.


def read_row(row: Mapping[str, Any], run: RunSettings, *, is_chat: bool) -> Demonstration:
    """Read a row with messages, or with prompt and completion, each a text or messages.

    A chat model gets a text prompt as its template's user turn, as in an episode.

    Args:
        row: Columns of the row; null is as if the column were not there.
        run: The settings of the run, which may have a system prompt.
        is_chat: Whether the model has a chat template.

    Raises:
        SettingsError: The row has another form.
    """
    filled = {name: value for name, value in row.items() if value is not None}
    tools = _read_tools(filled.get("tools", ()))
    if "messages" in filled:
        messages, first = _read_messages(filled["messages"], "messages"), 0
    elif "prompt" in filled and "completion" in filled:
        prompt, completion = filled["prompt"], filled["completion"]
        if not is_chat and isinstance(prompt, str) and isinstance(completion, str):
            said = Segment(completion, trained=True)
            return DemonstratedEpisode(read_prompt(prompt), (said,))
        messages = _read_messages(prompt, "prompt", role="user")
        first = len(messages)
        messages = messages + _read_messages(completion, "completion", role="assistant")
    else:
        raise SettingsError(
            f"a row must have {FORMS}, got the columns {quoted(', '.join(filled), 80)}; rename its "
            "columns, or convert it"
        )
    if run.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": run.system_prompt}, *messages]
        first += 1
    return DemonstratedChat(messages, tools, first)


def _read_tools(tools: Any) -> list[Any]:
    """Read a column of functions, which may be JSON text."""
    try:
        listed = json.loads(tools) if isinstance(tools, str) else tools
        return [dict(tool) for tool in listed]
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"tools must be a list of functions as chat templates take them, or JSON of one, got "
            f"{quoted(tools, 60)}; mend them, or leave them out"
        ) from error


def _read_messages(said: Any, column: str, role: str | None = None) -> list[dict[str, Any]]:
    """Read a column of messages; a text is one message, where it has a role."""
    if isinstance(said, str) and role is not None:
        return [{"role": role, "content": said}]
    messages: list[Any] = said if isinstance(said, list) else []
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        kind = "a list of messages" if role is None else "a text or a list of messages"
        raise SettingsError(
            f"{column} must be {kind} with role and content, got {quoted(said, 60)}; write "
            '[{"role": "user", "content": "..."}, ...]'
        )
    filled = ({k: v for k, v in message.items() if v is not None} for message in messages)
    try:
        return [chat_message(*numbered) for numbered in enumerate(filled)]
    except CallError as error:
        raise SettingsError(
            f"{column} must be messages with a role and a text, and calls of tools at most, got "
            f"other ones ({error.text}); mend that message"
        ) from error


def _shown_rows(
    rows: Rows, data: str, run: RunSettings, tokenizer: ModelTokenizer
) -> Iterator[tuple[str, Demonstration]]:
    """Yield the place and the demonstration of each row."""
    for number, row in enumerate(rows):
        where = f"row {number + 1} of {data}"
        if isinstance(rows, JsonLinesRows):
            where = rows.where(number)
        with _naming(where):
            demonstration = read_row(row, run, is_chat=tokenizer.has_template)
        yield where, demonstration


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the place of a row before an error."""
    try:
        yield
    except SettingsError as error:
        raise type(error)(f"{where}: {error}") from error


# --------------------------------------------------------------------------------------------------
# Demonstrations of the environment.


def shown_items(
    run: RunSettings, numbers: Iterable[int], *, seed: int, is_held_out: bool, needs_answers: bool
) -> Iterator[Demonstration]:
    """Yield the demonstrations of an environment's items.

    Raises:
        SettingsError: The environment cannot be made, or an item has none although `needs_answers`.
    """
    mixture, alone = run.mixture, run.by_environment
    environments = [make_environment(settings) for settings in alone.values()]
    for number in numbers:
        place = mixture.held_out(number) if is_held_out else mixture.training(number)
        environment = environments[place.environment]
        begin = environment.begin
        work = call(begin, place.item, seed, held_out=is_held_out, limit_s=TIMEOUT_S)
        conversation = finish(work) if needs_loop(environment, begin) else drive(work)
        prompt, segments = read_prompt(conversation.prompt), conversation.demonstration
        shown: Demonstration = DemonstratedEpisode(prompt, segments, tools_of(conversation))
        is_shown = bool(segments)
        if isinstance(conversation, AgentTask):
            chat = conversation.demonstrated_chat()
            is_shown = chat is not None
            shown = DemonstratedChat([{"role": "user", "content": text_of(prompt)}])
            if chat is not None:
                shown = DemonstratedChat(chat["messages"], chat["tools"])
        if needs_answers and not is_shown:
            raise SettingsError(
                f"run.environment must give demonstrations for a supervised start, got none from "
                f"{list(alone)[place.environment]} for item {place.item}; add them there, for live "
                "agents by environment_settings.demonstration, or set learner.warm_start_steps to 0"
            )
        yield shown


def echo(shown: Demonstration) -> DemonstratedEpisode:
    """Return the episode whose answer is its own prompt, without the prompt's last character.

    Raises:
        SettingsError: It is a chat, or has more or fewer segments than one answer.
    """
    if isinstance(shown, DemonstratedEpisode) and len(shown.segments) == 1:
        return shown._replace(segments=(Segment(text_of(shown.prompt)[:-1], trained=True),))
    kind = "a chat" if isinstance(shown, DemonstratedChat) else f"one of {len(shown.segments)}"
    raise SettingsError(
        f"learner.warm_start_echo must be 0 unless each demonstration has one segment, got "
        f"{kind}; set it to 0: the prompt replaces a single answer"
    )


def make_tokenizer_of(shown: Sequence[Demonstration], folder: Path) -> None:
    """Make the tokenizer of a model that `init` stands for, with all characters that are shown."""
    from actors.engine.character_tokenizer import make_tokenizer  # noqa: PLC0415 - transformers

    chats = [chat for chat in shown if isinstance(chat, DemonstratedChat)]
    tools = [tool for chat in chats for tool in chat.tools]
    texts = (demonstration.text for demonstration in shown)
    tokenizer = make_tokenizer(texts, tools=tools if chats else None)
    tokenizer.save_pretrained(folder)


# --------------------------------------------------------------------------------------------------
# The export.


@dataclass(slots=True)
class ExportCounts:
    """The rows that were written, and those that were too long."""

    rows: int = 0
    """Rows to train on."""
    held_out: int = 0
    cut: int = 0
    """Rows that were cut at the end, as they were longer than the context."""
    left_out: int = 0
    """Rows of which nothing that is trained was within the context."""


class RowExport:
    """Turns demonstrations into rows of tokens, and counts them."""

    def __init__(self, tokenizer: ModelTokenizer, run: RunSettings) -> None:
        self.counts = ExportCounts()
        self._tokenizer = tokenizer
        self._context = run.max_prompt_tokens + run.max_completion_tokens
        self._writer = DemonstrationsWriter()

    def add(self, shown: Demonstration, *, is_held_out: bool = False) -> None:
        """Add a demonstration, cut to the context of the run.

        Raises:
            SettingsError: As `tokenize`.
        """
        for pieces in tokenize(shown, self._tokenizer):
            token_ids = [token for piece in pieces for token in piece.token_ids]
            is_trained = [piece.is_trained for piece in pieces for _ in piece.token_ids]
            length = len(is_trained) - is_trained[::-1].index(True) if any(is_trained) else 0
            is_cut, length = length > self._context, min(length, self._context)
            token_ids, is_trained = token_ids[:length], is_trained[:length]
            if not any(is_trained[1:]):
                self.counts.left_out += 1
                continue
            self.counts.cut += is_cut
            self.counts.held_out += is_held_out
            self.counts.rows += not is_held_out
            self._writer.add(token_ids, is_trained, is_held_out=is_held_out)

    def write(self, folder: Path) -> None:
        """Write the rows that were added to a folder.

        Raises:
            SettingsError: There is none to train on.
        """
        if not self.counts.rows:
            raise SettingsError(
                f"demonstrations must have a trained token within the context of {self._context} "
                "tokens, got none that has; raise run.max_prompt_tokens and "
                "run.max_completion_tokens"
            )
        self._writer.write(folder)


def export(
    settings: Settings,
    out: Path,
    *,
    data: str | None = None,
    count: int = 0,
    held_out: int = 0,
    seed: int = 1,
    makes_tokenizer: bool = False,
) -> ExportCounts:
    """Write demonstrations in tokens to the folder `out`, and return how many there are.

    `out` is written under another name first, so it is complete once it exists.

    Args:
        settings: Settings of the run, which name model and environment.
        out: Folder to write; an existing one is replaced.
        data: Dataset whose rows are written; None = items of the environment.
        count: Items of the environment to write.
        held_out: Rows or items that are set aside.
        seed: Block of `count` training items to write; RL begins at item 0, in block 0.
        makes_tokenizer: Make the tokenizer of a model that `init` stands for, of the environment's
            texts. Without `learner.warm_start_steps` nothing else is written.

    Raises:
        SettingsError: The model has no tokenizer, the environment cannot be made, an item has no
            demonstration, or a row has another form; names the row.
        DeadlineError: The environment takes longer than 600 s.
    """
    durable.make_folder(out.parent)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    durable.DISK.remove(unfinished)
    durable.make_private_folder(unfinished)
    with durable.removed_if_unwritten(unfinished, errors=Exception):
        if data is not None:
            counts = _export_data(settings, unfinished, data, held_out)
        else:
            counts = call_within(
                TIMEOUT_S,
                partial(
                    _export_items,
                    settings,
                    unfinished,
                    count,
                    held_out,
                    seed,
                    makes_tokenizer=makes_tokenizer,
                ),
                what="export of run.environment",
            )
        durable.sync_tree(unfinished)
    durable.DISK.remove(out)
    durable.move(unfinished, out)
    return counts


def _export_data(settings: Settings, folder: Path, data: str, held_out: int) -> ExportCounts:
    tokenizer = ModelTokenizer.for_run(settings.run)
    rows, exporter = open_rows(data), RowExport(tokenizer, settings.run)
    if held_out >= len(rows):
        raise SettingsError(
            f"sft.held_out must be less than the {len(rows)} rows of {data}, got {held_out}; lower "
            "it, or add rows"
        )
    aside = set(random.Random(settings.run.seed).sample(range(len(rows)), held_out))
    shown = enumerate(_shown_rows(rows, data, settings.run, tokenizer))
    for number, (where, demonstration) in _with_progress(shown, len(rows)):
        with _naming(where):
            exporter.add(demonstration, is_held_out=number in aside)
    exporter.write(folder)
    return exporter.counts


def _export_items(
    settings: Settings,
    folder: Path,
    count: int,
    held_out: int,
    seed: int,
    *,
    makes_tokenizer: bool,
) -> ExportCounts:
    run, learner = settings.run, settings.learner
    needs_answers = not makes_tokenizer or learner.warm_start_steps > 0
    items = partial(shown_items, run, seed=seed, needs_answers=needs_answers)
    shown = list(items(range(seed * count, (seed + 1) * count), is_held_out=False))
    if makes_tokenizer:
        make_tokenizer_of(shown, folder / TOKENIZER)
        run = run.model_copy(update={"model": str(folder / TOKENIZER)})
    if not needs_answers:
        return ExportCounts()
    exporter, draw = RowExport(ModelTokenizer.for_run(run), run), random.Random(run.seed)
    for demonstration in _with_progress(shown, len(shown)):
        is_echo = makes_tokenizer and draw.random() < learner.warm_start_echo
        exporter.add(echo(demonstration) if is_echo else demonstration)
    for demonstration in items(range(held_out), is_held_out=True):
        exporter.add(demonstration, is_held_out=True)
    exporter.write(folder)
    return exporter.counts


def _with_progress(items: Iterable[T], number: int) -> Iterator[T]:
    """Yield items, and print lines for a progress bar."""
    reported = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            sys.stdout.write(json.dumps({"stage": "export", "step": done, "steps": number}) + "\n")
            sys.stdout.flush()
        yield item
