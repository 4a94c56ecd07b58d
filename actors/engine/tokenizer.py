"""Tokenizer of the run's model: text to tokens and back.

A chat model gets a text as its template's first user turn, messages as they are, and observations
as further user turns; another model gets the bare text, behind a begin-of-sequence token if its
tokenizer puts one there. Only the template writes control tokens: their names in messages are plain
text, and begin or end no turn.

transformers is imported only when a tokenizer is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from inspect import signature
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from actors.chat import ChatMessage, Prompt, as_given, as_messages
from actors.tool_calls import BEGINS, END_OF_THINKING, FAMILIES, ToolCall, read_calls
from configs.architecture import present_model
from configs.errors import SettingsError, quoted
from configs.settings import RunSettings

from .turns import TurnFrame

ANSWER = "AnswerOfTheAssistant"
"""Stands for a sampled turn, to see what a chat template puts around it."""

OBSERVATION = "ObservationOfTheEnvironment"
"""Stands for what follows a turn, to see what a chat template puts before it."""

MARK = "\U0010fffd"
"""A character of private use, around the number of a literal text that a template must keep."""
MARKED = re.compile(f"{MARK}([0-9]+){MARK}")

TRIAL = ToolCall("name_of_the_tool", {"argument": "a value", "number": 3})
"""A call that shows how a chat template writes calls."""
TRIAL_IDS = ("trial0001", "functions.name_of_the_tool:0")
"""Its ids: Mistral's templates want nine letters or digits, Kimi's write the name there alone."""
TRIAL_FUNCTION: Mapping[str, Any] = {
    "name": TRIAL.name,
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {"argument": {"type": "string"}, "number": {"type": "integer"}},
    },
}

NOTHING: Mapping[str, Any] = MappingProxyType({})

DATE = "date_string"
"""Variable of chat templates that write the day, as those of Llama 3 name it."""


class CallStyle(NamedTuple):
    """How a chat template writes calls of tools."""

    begin: str | None
    """What stands before each call; None = it is of no form that is read."""
    written: str
    """The trial call, or the template's error; empty if it leaves calls, tools or results out."""
    has_text: bool = False
    """It takes the arguments of a call as JSON text (DeepSeek)."""


class Chat(NamedTuple):
    """What a chat template renders for a live agent: messages with their calls, and functions."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] = ()
    variables: Mapping[str, Any] = NOTHING
    """Further variables of the template."""


class Tokenizer(Protocol):
    """Interface of a tokenizer, as the episode loop uses it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def encode_prompt(self, prompt: Prompt, tools: str = "") -> tuple[int, ...]:
        """Tokens of the prompt, up to where the policy begins its turn.

        Args:
            prompt: A text or messages.
            tools: JSON: functions that the policy may call; empty = none.
        """
        ...

    def encode_observation(self, observation: Prompt, *, is_open: bool = False) -> tuple[int, ...]:
        """Tokens between a turn's end and the policy's next turn.

        Args:
            observation: A text or messages.
            is_open: The turn did not end with its end token; that comes first.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of one turn, without its end token."""
        ...


class ModelTokenizer:
    """The tokenizer that lies beside the model's weights."""

    def __init__(
        self,
        model_path: str,
        *,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the tokenizer of a model.

        Args:
            model_path: Directory or hub name.
            system_prompt: Message before the prompt, for chat models; messages that begin with a
                system message of their own keep that one.
            template_kwargs: Further variables of the chat template, such as `enable_thinking`.

        Raises:
            SettingsError: There is no tokenizer, it has no end-of-sequence token, there is no chat
                template that a system prompt or variables could go into, or the template does not
                take them, drops the assistant's turns, or writes the current date.
        """
        tokenizer = _load(model_path)
        if tokenizer.eos_token_id is None:
            raise SettingsError(
                f"run.model must have a tokenizer with an end-of-sequence token, "
                f"got none in {model_path!r}, so no turn would end; choose another model"
            )
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        control = sorted((token.content for token in added if len(token.content) > 1), key=len)
        self._literals = (MARK, ANSWER, *reversed(control))  # the longest is looked for first
        as_json = (json.dumps(literal, ensure_ascii=False) for literal in self._literals)
        self._json_literals = tuple(text[1:-1] for text in as_json)
        first = [] if system_prompt is None else [("system", system_prompt)]
        self._first = [ChatMessage(role, self._marked(text)) for role, text in first]
        self._chat = tokenizer.chat_template is not None
        if not self._chat and (self._first or self._template_kwargs):
            name = "run.system_prompt" if self._first else "run.chat_template_kwargs"
            step = "put its text into the environment's prompts" if self._first else "leave it out"
            raise SettingsError(
                f"{name} must not be set where run.model has no chat template, got "
                f"{model_path!r} as run.model; {step}"
            )
        if "strftime_now" in str(tokenizer.chat_template) and DATE not in self._template_kwargs:
            raise SettingsError(
                f"run.chat_template_kwargs must have {DATE} where the chat template of run.model "
                f"writes the current date, which changes at midnight, got none; set a day, as in "
                f"{{{DATE}: 1 Jan 2026}}"
            )
        taken = signature(tokenizer.apply_chat_template).parameters
        self._taken = {"self", *taken} - {"documents", "kwargs"}
        """Names that are no variables of a chat template."""
        self.num_tokens = len(tokenizer)
        self._encode_literal = cache(self._literal_tokens)
        # Kept: every turn needs it, and the tokenizer searches for it each time.
        self._stop_token_ids = self._find_stops(model_path)
        self._begin = () if self._chat else self._find_begin()
        self._read_tools = cache(self._checked_tools)

    @classmethod
    def for_run(cls, run: RunSettings) -> ModelTokenizer:
        """Load the tokenizer of a run's model.

        Raises:
            SettingsError: It cannot be loaded, or a model that `init` stands for is not there.
        """
        path = Path(present_model(run)).expanduser()
        return cls(
            str(path) if path.exists() else run.model,
            system_prompt=run.system_prompt,
            template_kwargs=run.chat_template_kwargs,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End of sequence, what the model's generation configuration adds, and the turn's end."""
        return self._stop_token_ids

    def encode_prompt(self, prompt: Prompt, tools: str = "") -> tuple[int, ...]:
        """Tokens of the prompt, in the chat template where there is one.

        Raises:
            SettingsError: There is no template for messages or tools, or it does not take these.
        """
        if self._chat:
            turns = self._marked_messages(prompt)
            first = [] if turns[0].role == "system" else self._first
            more = {"tools": self._read_tools(tools)} if tools else {}
            return self._encode(self._render(as_given([*first, *turns]), more))
        bare = self._encode_piece(_bare(prompt, "tools" if tools else "messages"))
        return self._begin + tuple(bare)

    def encode_answer(self, answer: str) -> tuple[int, ...]:
        """Tokens of a turn that says just this, with the one that ends it."""
        return (*self._encode(self._marked(answer), is_behind=True), self._stop_token_ids[0])

    def encode_observation(self, observation: Prompt, *, is_open: bool = False) -> tuple[int, ...]:
        """Tokens of an observation, as the template's next user turn where there is one.

        Raises:
            SettingsError: There is no template for messages, or it does not take these.
        """
        # Encoded behind the end of a turn, never as a text of its own: some tokenizers put a space
        # before whatever begins a text.
        if not self._chat:
            text = self._tokenizer.eos_token + _bare(observation, "messages")
            return self._after_stops(tuple(self._encode_piece(text)), 1)
        # The template shows what stands between a turn's end token and the policy's next turn.
        turns = self._marked_messages(observation)
        before, after = self._around_answer(turns)
        # By a message of our own: the words of an observation may stand in an end token's name.
        shown = self._around_answer([ChatMessage(turns[0].role, OBSERVATION), *turns[1:]])[1]
        if not self._end_of_turn(shown.partition(OBSERVATION)[0]):
            return self._encode(after)
        num_ends = self._num_stops(self._encode(before)) + 1
        return self._after_stops(self._encode(before + after), num_ends, with_last=is_open)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of one turn; special tokens stay visible, so that none can hide in an answer."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._chat

    @property
    def shows_reasoning(self) -> bool:
        """Whether the chat template takes the reasoning of a turn as a field of its own."""
        return "reasoning_content" in str(self._tokenizer.chat_template)

    def render_chat(self, chat: Chat, *, go_on: bool = True) -> str:
        """Return what the template writes for a chat, up to where the policy begins its turn.

        Args:
            chat: The chat.
            go_on: False = end with the last message, and begin no turn behind it.

        Raises:
            SettingsError: There is no chat template, or it does not take this chat, or writes
                nothing.
        """
        if not self._chat:
            _bare((), "messages")
        if taken := sorted(set(chat.variables) & self._taken):
            raise SettingsError(
                f"chat_template_kwargs must be further variables of the chat template, got "
                f"{quoted(taken[0])}, which is not one; leave it out"
            )
        more = dict(chat.variables)
        if chat.tools:
            self.check_tools()
            more["tools"] = self._marked_json(chat.tools)
        turns = [self._marked_message(message) for message in chat.messages]
        text = self._render(turns, more, go_on=go_on)
        if not text:
            raise SettingsError(
                "messages must be such that the chat template of run.model writes something, got "
                "none that it does; send a text"
            )
        return text

    def encode_rendered(self, text: str, *, is_behind: bool = False) -> tuple[int, ...]:
        """Tokens of what `render_chat` returned, or of a part of it that stands behind another."""
        return self._encode(text, is_behind=is_behind)

    def encode_behind(
        self,
        said: Mapping[str, Any],
        following: Mapping[str, Any],
        text: str,
        *,
        variables: Mapping[str, Any],
        is_open: bool,
    ) -> tuple[int, ...] | None:
        """Tokens between the end of one of the policy's turns and its next one.

        Args:
            said: The turn as a message.
            following: The message behind it.
            text: What `render_chat` wrote from where the turn begins.
            variables: Further variables of the template.
            is_open: The turn did not end with its end token; that comes first.

        Returns:
            None if the template writes the turn differently here, or leaves out some of it.
        """
        asked = {"role": "user", "content": "question"}
        turn = self._marked_message(said)
        try:
            begin = self._render([asked], variables)
            behind = [asked, turn, {**self._marked_json(following), "content": ANSWER}]
            followed = self._render(behind, variables, go_on=False)
            last = self._render([asked, turn], variables, go_on=False)
        except SettingsError:  # the template takes no chat as short as this
            return None
        written, answer, _ = followed.removeprefix(begin).partition(ANSWER)
        thought, _, answered = turn["content"].rpartition(END_OF_THINKING)
        thought = turn.get("reasoning_content") or thought
        if not (followed.startswith(begin) and answer and text.startswith(written)):
            return None
        if thought.strip() not in written or answered.strip() not in written:
            return None
        stops = [stop for stop in self._stop_texts() if stop in written]
        end = min((written.index(stop) for stop in stops), default=-1)
        if end < 0:  # no token of the policy ends a turn here
            end = len(last) - len(begin)
            if not (last.startswith(begin) and written.startswith(last[len(begin) :])):
                return None
            return self._after_stops(self._encode(self._tokenizer.eos_token + text[end:]), 1)
        return self._after_stops(self._encode(text[end:]), 1, with_last=is_open)

    def check_tools(self) -> None:
        """Refuse a template whose calls of tools cannot be read, or that leaves tools out.

        Raises:
            SettingsError: It is such a template.
        """
        begin, written, _ = self._call_style
        if begin is None:
            shown = quoted(written.strip(), 120) if written.strip() else "one that leaves them out"
            raise SettingsError(
                f"run.model must have a chat template that writes tool calls as {FAMILIES} do, got "
                f"{shown}; choose another model, or go without tools"
            )

    @property
    def begin_of_call(self) -> str | None:
        """What the template writes before each call of a tool; None = such calls are not read."""
        return self._call_style.begin

    def turn_frame(self) -> TurnFrame | None:
        """Return the texts that the template puts around the policy's turn; None without one."""
        if not self._chat:
            return None
        asked = as_given([ChatMessage("user", "question")])
        closed = self._render(asked, go_on=False)
        opening = self._render(asked).removeprefix(closed)
        before, after = self._around_answer([])
        is_unopened = not opening and before.startswith(closed)
        unopened = before.removeprefix(closed).removesuffix(ANSWER) if is_unopened else ""
        return TurnFrame(opening, unopened.strip(), after, has_stop=self._end_of_turn(after) > 0)

    def _find_stops(self, model_path: str) -> tuple[int, ...]:
        stops = [int(self._tokenizer.eos_token_id), *_generation_stops(model_path)]
        if self._chat:
            # Where the template itself ends a turn; else no turn of some models would ever end.
            special = self._encode(self._around_answer([])[1].lstrip())[:1]
            added = self._tokenizer.added_tokens_decoder
            stops += [token for token in special if token in added and added[token].special]
        return tuple(dict.fromkeys(stops))

    def _stop_texts(self) -> list[str]:
        texts = map(self._tokenizer.convert_ids_to_tokens, self._stop_token_ids)
        return [text for text in texts if text]

    def _find_begin(self) -> tuple[int, ...]:
        """The token that the tokenizer itself puts before a text, if it does."""
        begin = self._tokenizer.bos_token_id
        added = self._tokenizer.encode("")
        return (int(begin),) if begin is not None and added[:1] == [begin] else ()

    def _around_answer(self, turns: Sequence[ChatMessage]) -> tuple[str, str]:
        """Render what the template puts up to an answer, and after it with these turns behind."""
        # Without the system prompt: some templates put it before the last of the user's turns.
        start = [ChatMessage("user", "question"), ChatMessage("assistant", ANSWER)]
        rendered = self._render(as_given([*start, *turns]), go_on=bool(turns))
        before, answer, after = rendered.rpartition(ANSWER)
        if not answer:
            raise SettingsError(
                "run.model must have a chat template that keeps the assistant's turns, got one "
                "that drops them; choose another model, or give it another chat_template"
            )
        return before + answer, after

    def _num_stops(self, token_ids: Sequence[int]) -> int:
        return sum(token in self._stop_token_ids for token in token_ids)

    def _after_stops(
        self, token_ids: tuple[int, ...], count: int, *, with_last: bool = False
    ) -> tuple[int, ...]:
        """Return what follows the first `count` tokens that end a turn, or begins with the last."""
        ends = [at for at, token in enumerate(token_ids) if token in self._stop_token_ids]
        assert len(ends) >= count, "a token that ends a turn is one token wherever it stands"
        return token_ids[ends[count - 1] + (not with_last) :]

    def _end_of_turn(self, text: str) -> int:
        """Find where the first token that ends a turn is over in a text; 0 = there is none."""
        ends = [(text.index(stop), len(stop)) for stop in self._stop_texts() if stop in text]
        return sum(min(ends, default=(0, 0)))

    def _marked_messages(self, said: Prompt) -> list[ChatMessage]:
        return [ChatMessage(*map(self._marked, message)) for message in as_messages(said)]

    def _marked(self, text: str, literals: Sequence[str] = ()) -> str:
        """Put marks in place of control tokens and of texts that `_around_answer` searches for.

        Args:
            text: Text to mark.
            literals: All of these as they are written in it; without them, as they are.
        """
        for number, literal in enumerate(literals or self._literals):
            if literal in text:
                text = text.replace(literal, f"{MARK}{number}{MARK}")
        return text

    def _encode(self, text: str, *, is_behind: bool = False) -> tuple[int, ...]:
        first, *rest = MARKED.split(text)
        token_ids = self._encode_behind(first) if is_behind else self._encode_piece(first)
        for number, after in zip(rest[::2], rest[1::2], strict=True):
            token_ids += self._encode_literal(int(number))
            token_ids += self._encode_behind(after)
        return tuple(token_ids)

    def _literal_tokens(self, number: int) -> list[int]:
        """Encode a literal in two parts, so that the tokenizer makes no control token of it."""
        literal = self._literals[number]
        return self._encode_behind(literal[:1]) + self._encode_behind(literal[1:])

    def _encode_behind(self, text: str) -> list[int]:
        # Behind a token, since some tokenizers put a space before whatever begins a text.
        return self._encode_piece(self._tokenizer.eos_token + text)[1:] if text else []

    def _encode_piece(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _checked_tools(self, tools: str) -> list[Any]:
        """Return the functions; refuse a template that cannot write them, a call and its result."""
        self.check_tools()
        functions: list[Any] = self._marked_json(json.loads(tools))
        result = self.encode_observation((ChatMessage("tool", OBSERVATION),))
        if OBSERVATION not in self.decode(result):
            raise SettingsError(
                "run.model must have a chat template that writes results of tools without names "
                "and ids for an environment with tools, got one that leaves them out; choose "
                "another model, or let a live agent call the tools (docs/agents.md)"
            )
        return functions

    @cached_property
    def _call_style(self) -> CallStyle:
        styles, errors = [], []
        for call_id, has_text in product(TRIAL_IDS, (False, True)):
            try:
                written = self._written_call(call_id, has_text=has_text)
            except SettingsError as error:
                errors.append(CallStyle(None, str(error.__cause__)))
                continue
            readings = ((begin, read_calls(written, [TRIAL_FUNCTION], begin)) for begin in BEGINS)
            whole = (begin for begin, calls in readings if [c[:2] for c in calls] == [TRIAL[:2]])
            styles.append(CallStyle(next(whole, None), written, has_text))
        return next((style for style in styles if style.begin is not None), [*styles, *errors][0])

    def _marked_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        marked: dict[str, Any] = self._marked_json(message)
        if "tool_calls" not in marked or not self._call_style.has_text:
            return marked
        calls = [_with_text(call) for call in marked["tool_calls"]]
        return marked | {"tool_calls": calls}

    def _marked_json(self, value: Any) -> Any:
        written = msgspec.json.encode(value).decode()  # json takes ten times as long
        if not any(literal in written for literal in self._json_literals):
            return value
        marked = self._marked(json.dumps(value, ensure_ascii=False), self._json_literals)
        return json.loads(marked)

    def _written_call(self, call_id: str, *, has_text: bool) -> str:
        """Render a call as the template writes it; nothing if it leaves tools or results out."""
        asked: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
        function = {"name": TRIAL.name, "arguments": TRIAL.arguments}
        call: dict[str, Any] = {"id": call_id, "type": "function", "function": function}
        calls = [_with_text(call) if has_text else call]
        called = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
        result = {"role": "tool", "name": TRIAL.name, "tool_call_id": call_id, "content": ANSWER}
        tools = {"tools": [{"type": "function", "function": TRIAL_FUNCTION}]}
        before = self._render(asked, tools)
        answered = self._render([*called, result], tools)
        if before == self._render(asked) or ANSWER not in answered:
            return ""
        turn = self._render(called, tools, go_on=False)
        begun = before, self._render(asked, tools, go_on=False)  # the prompt may open thinking
        turn = turn.removeprefix(next(filter(turn.startswith, begun), ""))
        for stop in self._stop_texts():
            turn = turn.partition(stop)[0]
        return turn

    def _render(
        self,
        turns: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] = NOTHING,
        *,
        go_on: bool = True,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(turns),
                tokenize=False,
                add_generation_prompt=go_on,
                **{**self._template_kwargs, **more},
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise SettingsError(
                f"run.system_prompt, run.chat_template_kwargs and the messages of prompts must "
                f"suit the chat template of run.model, got its error: {error}; leave out what the "
                f"template does not support"
            ) from error
        return text


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _bare(prompt: Prompt, kind: str) -> str:
    """Return the prompt of a model without a chat template, which takes text and no tools."""
    if not isinstance(prompt, str) or kind == "tools":
        instead = "an environment without tools" if kind == "tools" else "prompts that are texts"
        raise SettingsError(
            f"run.model must have a chat template for {kind}, got none; choose a chat model, or "
            f"{instead}"
        )
    return prompt


def check_same_tokenizer(run: RunSettings, teacher: str) -> None:
    """Refuse a teacher to whose model the token ids of the run's model mean something else.

    Raises:
        SettingsError: A token differs, or one of the tokenizers cannot be loaded.
    """
    ours, theirs = (_load(model).get_vocab() for model in (present_model(run), teacher))
    if ours != theirs:
        token = min({text for text, _ in ours.items() ^ theirs.items()})
        raise SettingsError(
            f"algorithm.teacher must have the tokenizer of run.model, got {teacher}, whose token "
            f"{token!r} is {theirs.get(token, 'missing')} and not {ours.get(token, 'missing')}; "
            "choose a teacher of the same family"
        )


def _load(model_path: str) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - transformers

    try:
        return AutoTokenizer.from_pretrained(model_path, mistral_format=False)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        advice = (
            "check the name, or that the machine can reach the hub"
            if not Path(model_path).is_dir()
            else "save it there with the tokenizer's `save_pretrained`"
        )
        raise SettingsError(
            f"run.model must be a model with a tokenizer, got {model_path!r} ({reason}); {advice}"
        ) from error


def _generation_stops(model_path: str) -> list[int]:
    """Read the end tokens in the model's `generation_config.json`, where it has one."""
    from transformers import GenerationConfig  # noqa: PLC0415 - transformers

    try:
        eos_token_id = GenerationConfig.from_pretrained(model_path).eos_token_id
    except (OSError, ValueError):  # no such file, or one that cannot be read
        return []
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
