"""Evaluation rounds beside training: held-out questions, answered by one policy version.

Each question is answered greedily, and `run.eval_samples` times as in training.

A round is created, collected while training goes on, and closed when it is complete or at its
deadline, which begins when actors sample. Consumes the store's evaluation results; waits only at
the end of the run, up to `learner.eval_timeout_s`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

import numpy as np
import structlog

from broker.protocol.codec import encode_spec
from buffer import operations
from buffer.operations.values import NewTask
from buffer.record.codec import decode_episode
from buffer.record.episode import Episode, PolicyVersion
from configs.errors import RecordError
from configs.settings import RunSettings
from configs.tables.algorithm import RewardSettings
from configs.traces import trace_created

from .curriculum import eval_task, eval_task_id, num_eval_tasks
from .grades import ACCURACY, REWARD, AnswerMetric, common_title, mean_parts, metrics_of
from .ledger import Ledger
from .records import shape_reward
from .retrying_store import RetryingStore

# --------------------------------------------------------------------------------------------------
# Figures of an evaluation's answers: score, mean reward, avg@n and pass@k.
#
# Legend of estimates: n sampled answers to a question, c of them right.


class EvaluationAnswer(NamedTuple):
    """One answer to a held-out question."""

    environment: str
    question: int
    """Number of the question in the round."""
    sample: int
    """0 = the greedy answer."""
    episode: Episode


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of k answers is right, without bias.

    Args:
        n: Answers.
        c: Number of right answers.
        k: At most n.

    Source:
        Chen et al. 2021, arXiv:2107.03374, equation 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def figures_of(
    answers: Sequence[EvaluationAnswer], metrics: Mapping[str, AnswerMetric]
) -> dict[str, float]:
    """Return `score` and `reward` of the greedy answers, `avg@n` and `pass@k` of the others.

    `avg@n` is the mean over questions of the mean grade of their answers, n the most that one of
    them has. `pass@k`, for powers of two up to n, is the mean over the questions that have at least
    k answers; an answer is right from a grade of 1 on. What has no answer is left out.
    """
    figures: dict[str, float] = {}
    greedy = [answer for answer in answers if answer.sample == 0]
    if greedy:
        figures["score"] = float(np.mean([_grade(answer, metrics) for answer in greedy]))
        figures[REWARD] = float(np.mean([answer.episode.reward for answer in greedy]))
    grades: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        if answer.sample > 0:
            grades[answer.question].append(_grade(answer, metrics))
    if grades:
        most = max(map(len, grades.values()))
        figures[f"avg@{most}"] = float(
            np.mean([np.mean(grades_of_one) for grades_of_one in grades.values()])
        )
        for k in _powers_of_two(most):
            passed = [
                _passed(grades_of_one, k)
                for grades_of_one in grades.values()
                if len(grades_of_one) >= k
            ]
            figures[f"pass@{k}"] = float(np.mean(passed))
    return figures


def environment_figures(
    answers: Sequence[EvaluationAnswer], metrics: Mapping[str, AnswerMetric]
) -> dict[str, dict[str, float | str]]:
    """Return the figures of each environment, their `metric`, and its answers as `episodes`."""
    figures: dict[str, dict[str, float | str]] = {}
    for name, metric in metrics.items():
        own_answers = [answer for answer in answers if answer.environment == name]
        if own_answers:
            figures[name] = {
                **figures_of(own_answers, metrics),
                "episodes": len(own_answers),
                "metric": metric.title,
            }
    return figures


def _grade(answer: EvaluationAnswer, metrics: Mapping[str, AnswerMetric]) -> float:
    return metrics[answer.environment].grade(answer.episode.reward, answer.episode.reward_parts)


def _passed(grades: Sequence[float], k: int) -> float:
    return pass_at_k(len(grades), sum(grade >= 1.0 for grade in grades), k)


def _powers_of_two(most: int) -> Iterable[int]:
    return (1 << exponent for exponent in range(most.bit_length()))


# --------------------------------------------------------------------------------------------------
# Evaluation rounds beside training: held-out questions, answered by one policy version.

log = structlog.get_logger()

COLLECT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of one round: a line of `eval.jsonl`."""

    step: int
    """Batches trained by the policy that answered."""
    metric: str
    """Metric by which answers are judged: `accuracy`, `reward`, or the name of another part."""
    score: float
    """Mean of the metric over greedy answers."""
    accuracy: float | None
    """The score where the metric is the environment's own part `exact`, and is trained."""
    reward: float
    """Mean reward of greedy answers, as it is trained."""
    parts: dict[str, float]
    """Mean of each part of the reward, of the greedy answers that have it."""
    sampled: dict[str, float]
    """`avg@n` and `pass@k` of sampled answers; empty where none are asked for."""
    environments: dict[str, dict[str, float | str]]
    """Name of an environment -> the same figures of its answers alone."""
    episodes: int
    """Answers that arrived in time."""
    expected: int
    """Answers requested."""
    versions: list[list[int]]
    """(lineage, step) of every policy that wrote a token of the answers."""
    off_version: int
    """Answers with a token of another policy than the evaluated one, such as a newer one."""
    wall_s: float
    """Seconds from creation to close."""


def log_result(evaluation: EvaluationResult) -> None:
    """Log the result of a round, and of each environment where there are several."""
    figures = {evaluation.metric: evaluation.score, REWARD: evaluation.reward, **evaluation.sampled}
    log.info("evaluated", step=evaluation.step, **_rounded(figures))
    if len(evaluation.environments) > 1:
        for name, of_it in evaluation.environments.items():
            log.info("evaluated", step=evaluation.step, environment=name, **_rounded(of_it))


def _rounded(figures: Mapping[str, float | str]) -> dict[str, float | str]:
    return {
        name: figure if isinstance(figure, str) else round(figure, 4)
        for name, figure in figures.items()
    }


def is_due(run: RunSettings, step: int) -> bool:
    """Whether the policy after `step` batches is evaluated."""
    if not run.mixture.num_questions:
        return False
    return step in (0, run.steps) or bool(run.eval_every and step % run.eval_every == 0)


def round_tasks(run: RunSettings, lineage: int, step: int) -> list[NewTask]:
    """Make the tasks of a round; only actors at version (lineage, step) or newer lease them."""
    first, questions = eval_task_id(run, lineage, step, 0), run.mixture.num_questions
    tasks = []
    for number in range(num_eval_tasks(run)):
        task_id, (sample, index) = first + number, divmod(number, questions)
        spec = encode_spec(eval_task(run, index, task_id, sampled=sample > 0))
        tasks.append(NewTask(task_id, task_id, spec, eval_step=step))
    return tasks


@dataclass(slots=True)
class _OpenRound:
    """A round that waits for answers, with its times."""

    step: int
    created: float
    counted_from: float
    """Time from which `learner.eval_timeout_s` is counted."""


class Evaluations:
    """Begins, collects and closes rounds, on rank 0."""

    def __init__(
        self,
        store: RetryingStore,
        run: RunSettings,
        *,
        rewards: RewardSettings,
        ledger: Ledger,
        timeout_s: float,
        report: Callable[[EvaluationResult], None],
        keep: Callable[[int, Sequence[EvaluationAnswer]], None] = lambda _step, _answers: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._run = run
        self._rewards = rewards
        self._metrics = metrics_of(run, rewards)
        self._timeout_s = timeout_s
        self._lineage = ledger.lineage
        self._ledger = ledger
        self._report = report
        self._keep = keep
        self._clock = clock
        self._open: list[_OpenRound] = []
        self._is_sampled = False
        self._names, self._mixture = list(run.by_environment), run.mixture
        self._collected_at = -COLLECT_EVERY_S

    def begin_round(self, step: int) -> None:
        """Create the tasks of a round."""
        self._ledger.open_round(step)
        tasks = round_tasks(self._run, self._lineage, step)
        began_ns = time.time_ns()
        self._store.run(operations.create(self._lineage, tasks))
        trace_created((task.task_id for task in tasks), began_ns=began_ns)
        now = self._clock()
        self._open.append(_OpenRound(step, now, now))

    def note_sampling(self) -> None:
        """Note that episodes arrive: from now on every round has a deadline."""
        self._is_sampled = True

    def collect(self) -> None:
        """Close and report the rounds that are complete or out of time; wait for none.

        Asks the store at most every `COLLECT_EVERY_S`. Unreadable answers are logged and left out,
        and a round without a greedy answer is logged, not reported.
        """
        now = self._clock()
        if not self._open or now - self._collected_at < COLLECT_EVERY_S:
            return
        self._collected_at = now
        for round_ in list(self._open):
            result = self._store.run(operations.eval_round(self._lineage, round_.step))
            self._is_sampled = self._is_sampled or bool(result.done or result.failed)
            if not self._is_sampled:
                round_.counted_from = now
            if result.unfinished and now - round_.counted_from < self._timeout_s:
                continue
            first = eval_task_id(self._run, self._lineage, round_.step, 0)
            ids = range(first, first + num_eval_tasks(self._run))
            result = self._store.run(operations.eval_round(self._lineage, round_.step, ids))
            if result.unfinished and now - round_.counted_from < self._timeout_s:
                continue  # Redis lost answers in the meantime
            self._open.remove(round_)
            self._ledger.close_round(round_.step)
            self._store.run(operations.close_eval(self._lineage, round_.step))
            self._close(round_, result.records, now)

    def finish(self, *, until: Callable[[], bool]) -> None:
        """Wait until every open round has closed, each by its own deadline, or `until` is true."""
        self.note_sampling()
        while self._open and not until():
            self.collect()
            time.sleep(0.05)

    def _close(self, round_: _OpenRound, records: Mapping[int, bytes], now: float) -> None:
        answers = self._answers(round_.step, records)
        self._keep(round_.step, answers)
        metrics = self._metrics_for(answers)
        figures = figures_of(answers, metrics)
        if "score" not in figures:
            log.warning("an evaluation had no greedy answer", step=round_.step)
            return
        episodes = [answer.episode for answer in answers]
        greedy = [answer for answer in answers if answer.sample == 0]
        title = common_title(metrics[answer.environment].title for answer in greedy)
        score = figures.pop("score")
        writers = [{span.version for span in e.completion.versions} for e in episodes]
        evaluated = PolicyVersion(self._lineage, round_.step)
        self._report(
            EvaluationResult(
                step=round_.step,
                metric=title,
                score=score,
                accuracy=score if title == ACCURACY else None,
                reward=figures.pop(REWARD),
                parts=mean_parts([answer.episode.reward_parts for answer in greedy]),
                sampled=figures,
                environments=environment_figures(answers, metrics),
                episodes=len(answers),
                expected=num_eval_tasks(self._run),
                versions=[list(version) for version in sorted(set().union(*writers))],
                off_version=sum(versions != {evaluated} for versions in writers),
                wall_s=round(now - round_.created, 3),
            )
        )

    def _metrics_for(self, answers: Sequence[EvaluationAnswer]) -> dict[str, AnswerMetric]:
        """Return the metric by which the answers of each environment can be judged."""
        metrics = {}
        for name, metric in self._metrics.items():
            parts = [
                answer.episode.reward_parts for answer in answers if answer.environment == name
            ]
            metrics[name] = metric.in_answers(parts)
            if parts and metrics[name].part != metric.part == self._run.eval_metric:
                log.warning(
                    "no answer has the part that run.eval_metric names",
                    eval_metric=metric.part,
                    environment=name,
                    parts=sorted(set().union(*parts)),
                )
        return metrics

    def _answers(self, step: int, records: Mapping[int, bytes]) -> list[EvaluationAnswer]:
        """Read the records of answers; a task's question follows from its number in the round."""
        first = eval_task_id(self._run, self._lineage, step, 0)
        answers = []
        for task_id, record in sorted(records.items()):
            sample, question = divmod(task_id - first, self._mixture.num_questions)
            environment = self._mixture.held_out(question).environment
            if (episode := _read(record)) is not None:
                episode = shape_reward(
                    episode,
                    self._rewards,
                    max_completion_tokens=self._run.max_completion_tokens,
                )
                answers.append(
                    EvaluationAnswer(self._names[environment], question, sample, episode)
                )
        return answers


def _read(record: bytes) -> Episode | None:
    try:
        return decode_episode(record)
    except RecordError as error:
        log.error("unreadable evaluation record", reason=str(error))
        return None
