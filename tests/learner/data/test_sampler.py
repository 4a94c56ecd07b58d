"""Samplers: what they choose, why one is refused, and the tasks that are made of a choice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from broker.protocol.codec import decode_spec
from buffer import operations
from buffer.operations.operation import Operation
from buffer.record.episode import INDEX
from buffer.store import Store
from configs.errors import SettingsError
from configs.hashes import settings_hash
from configs.settings import BufferSettings, RunSettings
from configs.tables.environments import Mixture
from learner.checkpointing.checkpoint import Checkpoints
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.resume import take_over
from learner.data import sampler
from learner.data.curriculum import Feeder, training_task, training_tasks
from learner.data.retrying_store import RetryingStore
from learner.data.sampler import (
    Pool,
    PromptResult,
    PromptSampler,
    Results,
    RewardsByPrompt,
    decode_curriculum,
    difficulty,
    encode_curriculum,
    make_sampler,
    rewards_by_prompt,
)
from learner.reporting.metrics import Totals
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import begin_run, new_ledger

RUN = RunSettings(
    model="m",
    seed=3,
    group_size=4,
    groups_per_batch=2,
    steps=10,
    sampler="difficulty",
    sampler_prompts=100,
)
HARD, MIXED, SOLVED = range(10), range(10, 20), range(20, 30)
MEASURED = Results(
    {prompt: PromptResult(1, 2, 0.0, 0.0) for prompt in HARD}
    | {prompt: PromptResult(1, 2, 0.5, 0.5) for prompt in MIXED}
    | {prompt: PromptResult(prompt, 2, 1.0, 1.0) for prompt in SOLVED}
)


def pool_of(results: Results, *, prompts: int = 100, in_flight: set[int] | None = None) -> Pool:
    return Pool("sums", prompts, 30, results, in_flight or set())


def answered(index: int, *rewards: float, group: int = 0) -> RewardsByPrompt:
    """Rewards of a group that asked the prompt of a training item."""
    return {(index, group): rewards}


def test_a_uniform_run_has_no_sampler_and_asks_as_it_always_did() -> None:
    run = RUN.model_copy(update={"sampler": "uniform"})

    assert make_sampler(run) is None
    specs = [decode_spec(task.spec) for task in training_tasks(run, range(3), {})]
    assert specs == [training_task(run, task_id) for task_id in range(12)]


def test_a_choice_is_a_pure_function_of_seed_group_and_results() -> None:
    chosen = [
        PromptSampler(RUN).choose(range(8), step=3, results={0: MEASURED}, in_flight=[7])
        for _ in range(2)
    ]
    other = PromptSampler(RUN.model_copy(update={"seed": 4}))

    assert chosen[0] == chosen[1]
    assert other.choose(range(8), step=3, results={0: MEASURED}, in_flight=[7]) != chosen[0]


def test_groups_chosen_in_two_calls_ask_what_one_call_chooses() -> None:
    of_run = PromptSampler(RUN)
    whole = of_run.choose(range(8), step=3, results={0: MEASURED}, in_flight=())

    first = of_run.choose(range(5), step=3, results={0: MEASURED}, in_flight=())
    rest = of_run.choose(range(5, 8), step=3, results={0: MEASURED}, in_flight=first.values())

    assert first | rest == whole


def test_no_prompt_is_asked_twice_at_a_time_while_there_are_others() -> None:
    chosen = PromptSampler(RUN).choose(range(90), step=3, results={0: MEASURED}, in_flight=[15])

    assert len({15, *chosen.values()}) == 91


def test_difficulty_prefers_prompts_between_never_and_always() -> None:
    pool = pool_of(MEASURED)

    counts = Counter(difficulty(0, group, pool) for group in range(4000))

    hard, mixed, solved = (sum(counts[p] for p in prompts) for prompts in (HARD, MIXED, SOLVED))
    unseen = 4000 - hard - mixed - solved
    assert mixed > 5 * hard > 0
    assert 0.22 < unseen / 4000 < 0.28
    assert 0.04 < solved / 4000 < 0.09
    assert counts[20] == solved, "the one that was trained longest ago"


def test_where_all_is_solved_the_solved_are_asked_and_where_all_is_in_flight_anything() -> None:
    solved = Results({prompt: PromptResult(9 - prompt, 2, 1.0, 1.0) for prompt in range(3)})

    assert difficulty(0, 1, pool_of(solved, prompts=3)) == 2
    assert difficulty(0, 1, pool_of(solved, prompts=3, in_flight={2})) == 1
    assert difficulty(0, 1, pool_of(Results(), prompts=2, in_flight={0, 1})) in {0, 1}


@pytest.mark.parametrize(
    ("right", "retired"),
    [
        ([2, 2, 1], [False, True, False]),
        ([1, 2, 2, 2, 2, 1], [False, False, False, False, True, False]),
    ],
)
def test_a_solved_prompt_retires_and_comes_back_when_it_fails(
    right: list[int], retired: list[bool]
) -> None:
    of_run = PromptSampler(RUN)
    results: dict[int, Results] = {}
    seen = []

    for step, count in enumerate(right, start=1):
        results = of_run.measure(results, step, answered(17, 1.0, float(count == 2)))
        seen.append(17 in pool_of(results[0]).solved)

    assert seen == retired
    assert results[0].prompts[17][:3] == (len(right), len(right), 0.5)


def test_rewards_of_another_scale_are_read_between_their_ends() -> None:
    of_run = PromptSampler(RUN)

    results = of_run.measure({}, 1, {(1, 0): [-1.0, 1.0], (2, 1): [1.0, 1.0]})

    pool = pool_of(results[0])
    assert (results[0].low, results[0].high) == (-1.0, 1.0)
    assert pool.success(1) == 0.5
    assert pool.success(2) == pytest.approx(1.0625 / 1.125)


def test_rewards_are_collected_by_prompt_and_group_where_episodes_name_their_prompt() -> None:
    episodes = [make_episode(number, group_id=number // 2, reward=number) for number in range(6)]
    named = [replace(episode, metadata={INDEX: "17"}) for episode in episodes[:4]]
    strange = replace(episodes[4], metadata={INDEX: "x"})

    found = rewards_by_prompt([*named, strange, episodes[5]])

    assert found == {(17, 0): [0, 1], (17, 1): [2, 3]}


def test_results_of_the_prompts_trained_longest_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "MOST_PROMPTS", 3)
    of_run = PromptSampler(RUN)
    results: dict[int, Results] = {}

    for step, prompt in enumerate((5, 6, 7, 5, 8), start=1):
        results = of_run.measure(results, step, answered(prompt, 1.0))

    assert sorted(results[0].prompts) == [5, 7, 8]


def test_what_a_checkpoint_keeps_is_read_back_to_the_bit() -> None:
    results = PromptSampler(RUN).measure({}, 1, answered(17, 0.1, 0.2, 0.7))

    kept = decode_curriculum(encode_curriculum({5: 17}, results))

    assert (kept.choices, kept.results) == ({5: 17}, results)
    assert decode_curriculum("").choices == {}


def test_the_figures_are_shares_of_all_prompts() -> None:
    figures = PromptSampler(RUN).success_shares({0: MEASURED})

    assert figures == {
        "prompts_unseen": 0.7,
        "prompts_hard": 0.1,
        "prompts_medium": 0.1,
        "prompts_easy": 0.0,
        "prompts_solved": 0.1,
    }


def test_a_group_keeps_its_environment_and_asks_among_its_prompts() -> None:
    run = RunSettings(
        model="m",
        sampler="difficulty",
        sampler_prompts=50,
        environments=[
            {"environment": "calculator", "share": 3},
            {"environment": "reasoning_gym", "sampler_prompts": 5},
        ],
    )
    mixture = run.mixture

    chosen = PromptSampler(run).choose(range(60), step=0, results={}, in_flight=())

    places = {group: mixture.training(item) for group, item in chosen.items()}
    assert all(p.environment == mixture.training(g).environment for g, p in places.items())
    assert {p.item for p in places.values() if p.environment == 1} == set(range(5))
    assert {p.item for p in places.values() if p.environment == 0} <= set(range(50))


def test_each_place_of_a_mixture_is_that_of_one_training_item() -> None:
    mixture = Mixture(5, shares=[1, 2, 5], eval_episodes=[0, 0, 0])

    items = [*range(0, 1000, 7), *range(12_000, 13_000, 11)]

    assert [mixture.training_item(*mixture.training(item)) for item in items] == items


# --------------------------------------------------------------------------------------------------
# Samplers of the user.


def own(folder: Path, body: str, *, prompts: int = 100) -> PromptSampler:
    file = folder / "mine.py"
    file.write_text(f"import random\n\ndef choose(seed, group, pool):\n    {body}\n")
    changes: dict[str, Any] = {"sampler": f"{file}:choose", "sampler_prompts": prompts}
    return PromptSampler(RUN.model_copy(update=changes))


def test_a_sampler_of_the_user_chooses_from_the_pool(tmp_path: Path) -> None:
    mine = own(tmp_path, "return max(pool.measured, key=pool.success) if pool.measured else group")

    assert mine.choose([4, 5], step=0, results={}, in_flight=()) == {4: 4, 5: 5}
    mine.try_out()
    results = {0: Results({8: PromptResult(1, 1, 0.2, 0.2), 9: PromptResult(1, 1, 0.4, 0.4)})}
    assert mine.choose([6], step=1, results=results, in_flight=()) == {6: 9}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return 100", r"whole number from 0 to 99, got 100 from .*mine.py:choose for group 7"),
        ("return -1", r"whole number from 0 to 99, got -1 "),
        ("return 1.0", r"whole number from 0 to 99, got 1\.0 "),
        ("return True", r"whole number from 0 to 99, got True "),
        ("return None", r"whole number from 0 to 99, got None "),
        ("return pool.measured[3]", r"got an error from .*: KeyError: 3, at .*mine.py:4: `return"),
    ],
)
def test_a_wrong_answer_of_a_users_sampler_is_refused(tmp_path: Path, body: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"run.sampler must return .*{text}"):
        own(tmp_path, body).choose([7], step=0, results={}, in_flight=())


def test_a_sampler_that_draws_other_numbers_each_time_is_refused(tmp_path: Path) -> None:
    mine = own(tmp_path, "return random.randrange(pool.num_prompts)")

    with pytest.raises(SettingsError, match=r"same prompt for the same arguments.*random\.Random"):
        mine.try_out()


def test_a_sampler_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run.sampler must be an existing file"):
        PromptSampler(RUN.model_copy(update={"sampler": f"{tmp_path}/none.py:choose"}))


# --------------------------------------------------------------------------------------------------
# Tasks of what was chosen.


def asked(store: Store, lineage: int, step: int = 0) -> dict[int, int]:
    """Lease all tasks; group -> the item that its tasks ask."""
    lease: Operation[Any] = operations.lease("a", ttl_ms=60_000, n=100, version=(lineage, step))
    specs = [decode_spec(task.spec) for task in store.run(lease).tasks]
    for spec in specs:
        assert spec.seed == training_task(RUN, spec.index * RUN.group_size).seed
    return {spec.group_id: spec.index for spec in specs}


def test_the_feeder_creates_what_was_chosen_and_notes_it_before(redis_url: str) -> None:
    with Store(redis_url, RUN.name) as store:
        begin_run(store, RUN)
        lineage = store.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        ledger, of_run = new_ledger(lineage), PromptSampler(RUN)
        feeder = Feeder(
            RetryingStore(store), RUN, BufferSettings(), ledger=ledger, cursor=0, sampler=of_run
        )

        assert feeder.feed() == 3, "a batch and one group more: choices are made late"
        assert ledger.facts.choices == of_run.choose(range(3), step=0, results={}, in_flight=())
        assert asked(store, lineage) == ledger.facts.choices


def test_a_repeatable_run_chooses_the_groups_of_a_batch_by_all_batches_before(
    redis_url: str,
) -> None:
    run = RUN.model_copy(update={"deterministic": True, "max_policy_lag": 0})
    with Store(redis_url, run.name) as store:
        begin_run(store, run)
        lineage = store.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        ledger = new_ledger(lineage)
        feeder = Feeder(
            RetryingStore(store),
            run,
            BufferSettings(),
            ledger=ledger,
            cursor=0,
            sampler=PromptSampler(run),
        )

        assert [feeder.feed(), feeder.feed()] == [2, 0]
        store.run(operations.advance(lineage, 1))
        ledger.advance(1, {})
        assert feeder.feed() == 1  # two are waiting, which no actor has taken
        assert len(asked(store, lineage, 1)) == 2
        assert feeder.feed() == 1


def test_the_second_try_of_a_dropped_group_asks_what_was_chosen_for_it() -> None:
    ledger = new_ledger(1)
    ledger.create([0, 1], {0: 40, 1: 41})
    ledger.ask_again([1])
    ledger.forget_choices([0, 1])

    assert ledger.create([2, 3], {2: 50, 3: 51}) == {1: 2}

    assert ledger.facts.choices == {2: 41, 3: 51}
    assert ledger.facts.asked == {2: 41, 3: 51}


def test_a_dropped_group_whose_choice_is_unknown_is_left_to_the_sampler() -> None:
    ledger = new_ledger(1)
    ledger.ask_again([7])

    assert ledger.create([8], {8: 50}) == {}
    assert ledger.facts.choices == {8: 50}


def test_a_choice_never_changes_and_ends_with_its_checkpoint() -> None:
    ledger = new_ledger(1)
    ledger.create([0, 1], {0: 40, 1: 41})
    ledger.create([0, 1, 2], {0: 60, 1: 61, 2: 42})
    ledger.hold(1, [0])
    assert ledger.facts.untrained_choices == {0: 40, 1: 41, 2: 42}

    ledger.advance(1, {0: MEASURED})
    assert ledger.facts.untrained_choices == {1: 41, 2: 42}
    ledger.checkpoint(1)

    assert ledger.facts.choices == {1: 41, 2: 42}
    assert ledger.facts.results == {0: MEASURED}


# --------------------------------------------------------------------------------------------------
# A learner that takes over a run whose Redis is empty.


class OneCheckpoint:
    """Checkpoints of a life that has ended: one, whose tensors nobody reads."""

    def __init__(self, state: LearnerState) -> None:
        self._state = state

    def newest(self) -> tuple[Path, LearnerState]:
        """Find it."""
        return Path("step-000001"), LearnerState.decode(self._state.encode())


def test_a_later_life_creates_what_an_earlier_one_chose_in_an_empty_store(
    redis_url: str, tmp_path: Path
) -> None:
    run = RUN.model_copy(update={"directory": tmp_path})
    results = PromptSampler(run).measure({}, 1, {(17, 0): [0.1, 0.2, 0.7], (18, 1): [1.0]})
    state = LearnerState(
        run=run.name,
        settings_hash=settings_hash(run),
        step=1,
        lineage=1,
        cursor=5,
        trained=((0, 2),),
        totals=Totals(),
        curriculum=encode_curriculum({2: 40, 4: 41}, results),
    )
    with Store(redis_url, run.name) as store:
        checkpoints = cast("Checkpoints", OneCheckpoint(state))
        start = take_over(run, BufferSettings(), RetryingStore(store), checkpoints)

        assert start.ledger().facts.results == results
        assert asked(store, start.lineage, 1) == {2: 40, 4: 41}, "group 3 was dropped"
