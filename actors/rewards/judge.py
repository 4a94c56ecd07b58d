"""A language model as a judge: a reward function that asks an OpenAI-compatible server.

    # rewards.py, beside the settings; run.reward is rewards.py:helpful
    from pathlib import Path
    from actors.rewards.judge import Judge

    rubric = Path(__file__).with_name("rubric.txt")
    helpful = Judge(url="http://127.0.0.1:8000/v1", model="judge", rubric=rubric)

A rubric is a text with `{prompt}`, `{completion}`, `{answer}` and the columns of the item in
braces. The score is the number after the last "score:" or in `[[4]]`, or else the only number of
the reply or its last line; `3/10` and "3 out of 10" are 3 of 10. A reply that cannot be read for
certain, or with a score beyond the scale such as "2024", scores 0 and is counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import re
import sqlite3
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.chat import column_at, fill_in
from actors.numbers import SENTENCE, read_number, stated_number
from configs.errors import SettingsError
from configs.machine import install_command

if TYPE_CHECKING:
    from openai import AsyncOpenAI

RETRIES = 4  # of the client, with back-off and jitter
REPORT_EVERY = 500  # replies
MOST_UNREAD = 32  # replies without a score in a row, before the rubric is taken to be wrong
MOST_SCORES = 1_000_000  # remembered
LABEL = re.compile(r"\b(?:score|rating|grade)(?: is| of)?[ :=]{1,3}(?=[-+.0-9])", re.IGNORECASE)
RATIO = re.compile(r"%|[0-9] ?/ ?[0-9]")


class Judge:
    """Scores completions by the replies of a language model.

    A reply without a score counts 0. Scores are remembered, and equal requests sent once.

    Args:
        url: Address of the server, up to `/v1`.
        model: Name of the model there.
        rubric: Path of the text that is sent for each completion.
        most: Score of a perfect completion; the reward is the score divided by it, 0 to 1.
        concurrency: Requests at a time, of each actor.
        key_env: Environment variable that holds the key of the server; without it none is sent.
        cache: File that keeps scores by content, shared by the actors of a machine; None = each
            actor remembers its own.
        max_tokens: Longest reply.

    Raises:
        SettingsError: The rubric cannot be read, or the `openai` package is not installed.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        rubric: str | Path,
        most: float = 10.0,
        concurrency: int = 16,
        key_env: str = "OPENAI_API_KEY",
        cache: str | Path | None = None,
        max_tokens: int = 1024,
    ) -> None:
        self._url, self._model, self._most = url, model, most
        self._key = os.environ.get(key_env, "none")
        self._concurrency, self._max_tokens = concurrency, max_tokens
        self._rubric = _read(Path(rubric))
        if importlib.util.find_spec("openai") is None:
            raise SettingsError(
                f"a judge must have the package openai, which is not installed; "
                f"install the extra `judge`: {install_command('judge')}"
            )
        self._scores = ScoreCache(cache)
        self.num_replies = self.num_cached = self.prompt_tokens = self.completion_tokens = 0
        self.num_unread = 0
        self._unread_in_row = MOST_UNREAD  # until there is a score: a rubric must work at first

    async def __call__(
        self, prompts: list[Any], completions: list[Any], answer: list[Any], **columns: Any
    ) -> list[float]:
        """Ask the judge for each completion; return rewards from 0 to 1.

        Raises:
            ValueError: The rubric names a missing column; or the first reply, or many in a row,
                have no score.
            openai.OpenAIError: The server does not answer, after some tries.
        """
        fillings = {**columns, "prompt": prompts, "completion": completions, "answer": answer}
        requests = [
            self._fill({name: values[i] for name, values in fillings.items()})
            for i in range(len(completions))
        ]
        limit = asyncio.Semaphore(self._concurrency)
        async with _client(self._url, self._key) as client:
            asked = (self._score(client, request, limit) for request in requests)
            scores = await asyncio.gather(*asked, return_exceptions=True)
        rewards = []
        for score in scores:  # scores that arrived are in the cache when the batch comes again
            if isinstance(score, BaseException):
                raise score
            rewards.append(score / self._most)
        return rewards

    def _fill(self, fillings: dict[str, Any]) -> str:
        def value(name: str) -> str:
            try:
                return _as_text(column_at(fillings, name))
            except KeyError:
                names = ", ".join(sorted(fillings))
                raise ValueError(
                    f"a placeholder of the rubric must be one of {names}, got {{{name}}}; correct "
                    f"it, or double its braces to send it as text"
                ) from None

        return fill_in(self._rubric, value)

    async def _score(self, client: AsyncOpenAI, request: str, limit: asyncio.Semaphore) -> float:
        key = hashlib.sha256(json.dumps([self._model, self._most, request]).encode()).hexdigest()
        cached = self._scores.get(key)
        if cached is not None:
            self.num_cached += 1
            return cached
        async with limit:
            reply = await client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": request}],
                temperature=0.0,
                max_tokens=self._max_tokens,
            )
        self.num_replies += 1
        if reply.usage is not None:
            self.prompt_tokens += reply.usage.prompt_tokens
            self.completion_tokens += reply.usage.completion_tokens
        if self.num_replies % REPORT_EVERY == 0:
            sys.stderr.write(f"{self.cost}\n")
        choice = reply.choices[0]
        return self._read(key, choice.message.content or "", choice.finish_reason == "length")

    def _read(self, key: str, reply: str, is_cut: bool) -> float:
        """Read a reply and remember its score; 0 for a reply without one.

        Raises:
            ValueError: Too many replies in a row had no score.
        """
        try:
            score = read_score(reply, self._most, is_cut=is_cut)
        except ValueError as error:
            self._unread_in_row += 1
            if self._unread_in_row > MOST_UNREAD:
                raise
            self.num_unread += 1
            if self.num_unread.bit_count() == 1:  # the first, and whenever there are twice as many
                sys.stderr.write(f"{self.num_unread} replies without a score count 0: {error}\n")
            return 0.0
        self._unread_in_row = 0
        self._scores.put_score(key, score)
        return score

    @property
    def cost(self) -> str:
        """One line about the requests so far."""
        return (
            f"judge {self._model}: {self.num_replies} replies, {self.num_unread} without a score, "
            f"{self.num_cached} from the cache, "
            f"{self.prompt_tokens} prompt and {self.completion_tokens} completion tokens"
        )


class ScoreCache:
    """Scores by the digest of their request, in SQLite: in memory, or in a file of several actors.

    Args:
        path: Path of the file; None = in memory.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._database = sqlite3.connect(
            path or ":memory:",
            timeout=10,
            isolation_level=None,
            check_same_thread=False,  # the collector of any thread may end it
        )
        weakref.finalize(self, self._database.close)  # Python 3.13 warns of one that is left open
        if path is not None:
            self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score)")

    def get(self, key: str) -> float | None:
        """Return the score of a request, or None."""
        row = self._database.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put_score(self, key: str, score: float) -> None:
        """Store the score of a request; the oldest beyond a million are removed."""
        run = self._database.execute
        run("INSERT OR REPLACE INTO scores VALUES (?, ?)", (key, score))
        run("DELETE FROM scores WHERE rowid <= (SELECT max(rowid) FROM scores) - ?", (MOST_SCORES,))


def read_score(reply: str, most: float, *, is_cut: bool = False) -> float:
    """Read the score of a reply.

    Args:
        reply: Text of the judge.
        most: Top of the scale.
        is_cut: The reply was cut off by `max_tokens`: only a labelled score counts.

    Raises:
        ValueError: No score can be read for certain, or it is not from 0 to `most`.
    """
    score = _stated_score(reply[-SENTENCE:], most, is_cut=is_cut)
    if score is None or not 0 <= score <= most:
        raise ValueError(
            f"the judge must end its reply with a number from 0 to {most:g}, got {reply[-80:]!r}; "
            f"say so in the rubric{', or raise max_tokens, which cut this reply' if is_cut else ''}"
        )
    return score


def _stated_score(reply: str, most: float, *, is_cut: bool) -> float | None:
    scale = re.compile(
        rf"(?: out of| ?/|\bof|\bfrom [01] to) ?{most:g}(?![.,]?[0-9])", re.IGNORECASE
    )
    lines = [
        scale.sub("", " ".join(line.replace("*", "").split()))
        for line in reply.splitlines()
        if line.strip()
    ]
    text = "\n".join(lines)
    marked = text.rpartition("[[")[2].partition("]]") if "[[" in text else ("", "", "")
    if marked[1]:
        return read_number(marked[0])
    called = [match.end() for match in LABEL.finditer(text)]
    if called:
        sentence = re.split(r"[.,;!](?: |$)|\n", text[called[-1] :], maxsplit=1)[0]
        return None if RATIO.search(sentence) else stated_number(sentence)
    if is_cut or not lines or RATIO.search(text):
        return None
    last = stated_number(lines[-1])
    return stated_number(text) if last is None else last


def _client(url: str, key: str) -> AsyncOpenAI:
    # A client belongs to the event loop of one call.
    from openai import AsyncOpenAI  # noqa: PLC0415 - openai, not needed elsewhere

    return AsyncOpenAI(base_url=url, api_key=key, max_retries=RETRIES)


def _as_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        return "\n\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value)
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return "" if value is None else str(value)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"the rubric of a judge must be a text file, got {path} in {Path.cwd()}: {error}; name "
            "a file that this user can read"
        ) from None
