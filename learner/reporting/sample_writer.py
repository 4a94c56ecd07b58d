"""Rank 0's thread that keeps episodes as text in the run's files; the run's tokenizer.

Consumes a bounded queue of episodes, which the step only appends to. When the thread is behind,
further episodes are dropped and counted: training never waits for it, nor ends with it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from random import Random
from typing import Any

import structlog
from transformers import AutoTokenizer

from buffer.record.episode import Episode
from configs.architecture import present_model
from configs.settings import RunSettings
from configs.worker import Worker
from learner.data.evaluation import EvaluationAnswer
from learner.training.guards import Alert

from .advice.gathering import NO_VOCABULARY, Vocabulary
from .samples import Origin, SampleFiles, SampleLine, encoded, sample_line

# --------------------------------------------------------------------------------------------------
# The tokenizer of the run's model, as rank 0 reads texts with it.


def run_tokenizer(run: RunSettings) -> Any:
    """Load the run's tokenizer, once for a process.

    Raises:
        OSError: There is no tokenizer.
        ValueError: The tokenizer cannot be read.
    """
    return _load(present_model(run))


def run_vocabulary(run: RunSettings) -> Vocabulary:
    """Return the tokens that the advisor looks for; nothing for a model without a tokenizer."""
    try:
        tokenizer = run_tokenizer(run)
    except (OSError, ValueError):
        return NO_VOCABULARY
    added = tokenizer.added_tokens_decoder.items()
    return Vocabulary(
        special={token_id: token.content for token_id, token in added if token.special},
        end=tokenizer.eos_token_id,
        is_blank=lambda token_id: not tokenizer.decode([token_id]).strip(),
        stop=run.stop,
        decode=lambda token_ids: str(
            tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        ),
    )


@cache
def _load(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path, mistral_format=False)


# --------------------------------------------------------------------------------------------------
# The thread that keeps episodes: text, line, file, all beside training.

log = structlog.get_logger()

MAX_WAITING_TOKENS = 4 * 2**20  # some 40 MB of arrays: several batches and an evaluation
BATCHES = 2  # whose kept groups may wait, however long their rows are
SAMPLED_ANSWERS = 4  # of each question beside the greedy one; 1,024 would push all else out
LINES = 64  # of one append: so many are lost at most if the process is killed
CLOSE_S = 20.0  # for what waits: three times what `MAX_WAITING_TOKENS` of a busy machine take

Decode = Callable[[Sequence[int]], str]


class SampleWriter:
    """Keeps groups of batches, and the answers of evaluations, as `run.samples` asks for."""

    def __init__(
        self,
        run: RunSettings,
        *,
        step: int,
        lineage: int,
        environment_of: Callable[[int], str],
        decode: Decode | None = None,
    ) -> None:
        """Load the tokenizer; the files are first touched by `start`.

        Args:
            run: Settings of the run.
            step: Step at which the learner resumes; lines of later steps are removed.
            lineage: The learner's own.
            environment_of: Names the environment of a group.
            decode: Text of tokens; by default that of the run's tokenizer.
        """
        self._run, self._settings = run, run.samples
        self._lineage, self._environment_of = lineage, environment_of
        self._step = step
        longest = run.max_prompt_tokens + run.max_completion_tokens
        kept = min(self._settings.groups, run.groups_per_batch) * run.group_size * longest
        self._most_waiting_tokens = max(MAX_WAITING_TOKENS, BATCHES * kept)
        self._files = SampleFiles(run.folder, max_bytes=self._settings.max_mb * 2**20)
        self._queue: queue.SimpleQueue[tuple[Origin, Episode] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_tokens = 0
        self._failure: str | None = None
        self._kept = 0
        self._cpu_s = 0.0
        self.dropped = 0
        """Episodes that were to be kept and are not."""
        # Here, not in the thread: two threads that import parts of transformers may both fail.
        self._decode = decode or (self._load() if self._settings.max_mb else None)
        self._worker = Worker(self._work, name="samples")

    def start(self) -> None:
        """Start the thread that writes."""
        if self._decode is not None:
            self._worker.start()

    def keep_batch(self, step: int, episodes: Sequence[Episode]) -> None:
        """Keep some groups of a batch, if the settings keep samples of this batch.

        Never waits: episodes for which the thread has no room are counted in `dropped`.
        """
        if not self._settings.has_batch(step):
            return
        groups = sorted({episode.group_id for episode in episodes})
        # By step alone: a batch that is trained again after a crash keeps the same groups.
        drawn = Random(f"{self._run.seed}:{step}").sample(
            groups, min(self._settings.groups, len(groups))
        )
        for episode in sorted(episodes, key=lambda member: (member.group_id, member.task_id)):
            if episode.group_id in drawn:
                environment = self._environment_of(episode.group_id)
                self._put(Origin(step, self._lineage, environment), episode)

    def keep_answers(self, step: int, answers: Iterable[EvaluationAnswer]) -> None:
        """Keep, as `keep_batch`, the greedy answer and 4 sampled ones of each question."""
        for answer in answers if self._settings.max_mb else ():
            if answer.sample <= SAMPLED_ANSWERS:
                origin = Origin(step, self._lineage, answer.environment, answer.sample)
                self._put(origin, answer.episode)

    def alerts(self) -> list[Alert]:
        """Return the reason why no samples are kept as an alert, if there is one.

        It is the error that ended the thread, or that there is no tokenizer.
        """
        try:
            self._worker.raise_if_failed()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run does not need samples
            self._failure = f"{type(error).__name__}: {error}"
        if self._failure is None:
            return []
        why = (
            f"episodes must be kept as text in samples.jsonl, got {self._failure}; mend that, and "
            "start the learner again: until then the run goes on without samples"
        )
        return [Alert("samples_not_kept", why)]

    def close(self) -> None:
        """Write what waits, for `CLOSE_S` at most, and end the thread."""
        if not self._worker.is_alive:
            return
        self._queue.put(None)
        try:
            self._worker.join(CLOSE_S)
        except Exception:  # noqa: BLE001 - it has logged its error
            return
        figures = {"kept": self._kept, "dropped": self.dropped, "cpu_s": round(self._cpu_s, 3)}
        log.info("samples", **figures, unwritten_tokens=self._waiting_tokens)

    def _load(self) -> Decode | None:
        try:
            tokenizer = run_tokenizer(self._run)
        except (OSError, ValueError) as error:
            self._failure = f"no tokenizer ({error})"
            return None

        def decode(token_ids: Sequence[int]) -> str:
            text: str = tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return text

        return decode

    def _put(self, origin: Origin, episode: Episode) -> None:
        tokens = _num_tokens(episode)
        with self._lock:
            fits = self._waiting_tokens + tokens <= self._most_waiting_tokens
            if not (fits and self._worker.is_alive):
                self.dropped += 1
                return
            self._waiting_tokens += tokens
        self._queue.put((origin, episode))

    def _work(self) -> None:
        assert self._decode is not None
        self._files.rewind(self._step)
        is_open = True
        while is_open:
            items, is_open = self._take()
            lines: list[SampleLine] = []
            for origin, episode in items:
                lines.append(sample_line(origin, episode, self._decode))
            if lines:
                self._files.append(encoded(lines))
            self._kept += len(lines)
            self._cpu_s = time.thread_time()
            with self._lock:
                self._waiting_tokens -= sum(_num_tokens(episode) for _, episode in items)

    def _take(self) -> tuple[list[tuple[Origin, Episode]], bool]:
        """Wait for episodes; False after the last ones."""
        items: list[tuple[Origin, Episode]] = []
        item = self._queue.get()
        while item is not None:
            items.append(item)
            if len(items) == LINES or self._queue.empty():
                return items, True
            item = self._queue.get()
        return items, False


def _num_tokens(episode: Episode) -> int:
    return len(episode.prompt_ids) + len(episode.completion.token_ids)
