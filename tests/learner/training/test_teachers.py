"""Teachers in the learner: tokens that each scores, behind which prompt, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer.record.episode import Episode
from configs.errors import RecordError, SettingsError
from configs.settings import AlgorithmSettings, LearnerSettings, Settings
from learner.algorithm.microbatch import PreparedMicrobatch
from learner.assembly import load_policy, load_teachers
from learner.data.batch import BatchPlan, pack, plan_batch, prompt_of_episode
from learner.model.policy import Policy, freeze
from learner.model.ranks import Ranks
from learner.training.optimizer import ScheduledOptimizer
from learner.training.preparation import prepare, score
from learner.training.step import train_batch
from tests.actors.support.saved_tokenizer import save_tokenizer
from tests.learner.support.adapted_policy import fill_adapters
from tests.learner.support.made_branches import random_branched_episodes
from tests.learner.support.made_critic import HEAD, VTRACE, make_pair
from tests.learner.support.made_episodes import make_episode, random_group_episodes
from tests.learner.support.tiny_policy import (
    constant_rate,
    save_tiny_model,
    tiny_causal_lm,
    tiny_policy,
)

ALONE = AlgorithmSettings(
    advantage="none", correction="none", surrogate="reinforce", teacher="t", rho_bar=1e6
)
BY_NAME = ALONE.model_copy(update={"teacher": {"even": "t", "odd": "u"}})
TEACHER = freeze(tiny_policy(seed=3))
OTHER = freeze(tiny_policy(seed=4))
MESSAGE = np.array([17, 18, 19], dtype=np.int32)


def environment_of(group_id: int) -> str:
    """Name the environment of a group."""
    return "odd" if group_id % 2 else "even"


def with_message(episode: Episode) -> Any:
    """Put a message before the prompt, another one for every second episode."""
    return np.concatenate([MESSAGE[: 1 + episode.task_id % 2], episode.prompt_ids])


def planned(
    episodes: Sequence[Episode], settings: AlgorithmSettings, *, microbatch_tokens: int = 40
) -> BatchPlan:
    """Plan a batch for one rank."""
    return plan_batch(
        1,
        episodes,
        ranks=1,
        settings=settings,
        max_completion_tokens=16,
        microbatch_tokens=microbatch_tokens,
        environment_of=environment_of,
    )


def prepared_with(
    episodes: Sequence[Episode],
    settings: AlgorithmSettings,
    teachers: Sequence[Policy],
    ranks: Ranks,
    *,
    prompt: Callable[[Episode], Any] = prompt_of_episode,
    microbatch_tokens: int = 40,
) -> list[PreparedMicrobatch]:
    """Pack and prepare a batch."""
    plan = planned(episodes, settings, microbatch_tokens=microbatch_tokens)
    microbatches = pack(
        plan, episodes, settings=settings, lineages={1: 0}, lineage=1, teacher_prompt=prompt
    )
    return prepare(tiny_policy(), microbatches, settings=settings, ranks=ranks, teachers=teachers)


def alone(policy: Policy, episode: Episode, ranks: Ranks) -> list[float]:
    """Score the trained tokens of one episode, in a pass of its own."""
    plan = planned([episode], AlgorithmSettings())
    (microbatch,) = pack(plan, [episode], settings=AlgorithmSettings(), lineages={1: 0}, lineage=1)
    scores: list[float] = score(policy, microbatch.to(ranks.device)).logprobs_N.tolist()
    return scores


def test_an_advantage_is_what_the_teacher_finds_likelier_on_top_of_the_reward(
    ranks: Ranks,
) -> None:
    episodes = random_group_episodes(4, 3, seed=1)
    settings = AlgorithmSettings(teacher="t", teacher_weight=0.5)

    both = prepared_with(episodes, settings, [TEACHER], ranks)

    rewards = {row.task_id: row.advantage for row in planned(episodes, settings).rows}
    assert any(rewards.values())
    expected = sorted(
        rewards[episode.task_id] + 0.5 * (theirs - ours)
        for episode in episodes
        for ours, theirs in zip(
            alone(tiny_policy(), episode, ranks), alone(TEACHER, episode, ranks), strict=True
        )
    )
    found = sorted(torch.cat([each.microbatch.advantages_N for each in both]).tolist())
    assert len(both) > 1
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "episodes",
    [random_group_episodes(6, 3, seed=2), random_branched_episodes(12, seed=3)],
    ids=["groups", "branches"],
)
def test_each_episode_is_scored_by_its_environments_teacher_behind_its_own_message(
    episodes: list[Episode], ranks: Ranks
) -> None:
    episodes = [_within_vocabulary(episode) for episode in episodes]
    teachers = {"even": TEACHER, "odd": OTHER}

    prepared = prepared_with(episodes, BY_NAME, [TEACHER, OTHER], ranks, prompt=with_message)

    expected = []
    for episode in episodes:
        read = replace(episode, prompt_ids=with_message(episode))
        expected += alone(teachers[environment_of(episode.group_id)], read, ranks)
    found = _in_order_of_tasks(prepared, episodes)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found != pytest.approx(
        [each for episode in episodes for each in alone(TEACHER, episode, ranks)], abs=1e-2
    )


def _within_vocabulary(episode: Episode) -> Episode:
    ids = episode.completion.token_ids % 20
    return replace(
        episode,
        prompt_ids=episode.prompt_ids % 20,
        completion=replace(episode.completion, token_ids=ids),
    )


def _in_order_of_tasks(
    prepared: Sequence[PreparedMicrobatch], episodes: Sequence[Episode]
) -> list[float]:
    """Join the teachers' log-probs by task; the behaviour's log-probs tell the tasks apart."""
    scores = {}
    for each in prepared:
        assert each.log_teacher_N is not None
        for number in each.microbatch.episodes_N.unique():
            mine = each.microbatch.episodes_N == number
            key = tuple(each.microbatch.behaviour_logprobs_N[mine].tolist())
            assert key not in scores
            scores[key] = each.log_teacher_N[mine].tolist()
    keys = [
        tuple(e.completion.behaviour_logprobs[e.completion.loss_mask.astype(bool)].tolist())
        for e in episodes
    ]
    return [score for key in keys for score in scores[key]]


def test_an_environment_without_a_teacher_learns_from_its_reward_alone(ranks: Ranks) -> None:
    episodes = random_group_episodes(4, 3, seed=1)
    settings = AlgorithmSettings(teacher={"even": "t"})

    prepared = prepared_with(episodes, settings, [TEACHER], ranks)

    untaught = {e.task_id for e in episodes if environment_of(e.group_id) == "odd"}
    rewards = [
        row.advantage
        for row in planned(episodes, settings).rows
        for _ in range(episodes[row.task_id].completion.num_trained)
        if row.task_id in untaught
    ]
    found = torch.cat(
        [
            each.microbatch.advantages_N[each.log_teacher_N.isnan()]
            for each in prepared
            if each.log_teacher_N is not None
        ]
    )
    assert sorted(found.tolist()) == pytest.approx(sorted(rewards))


def test_under_v_trace_a_teachers_advantage_is_weighed_as_the_others_are(
    tmp_path: Path, ranks: Ranks
) -> None:
    """No correction weighs prox/mu there: without the weight it would be dropped."""
    critic = make_pair(HEAD.model_copy(update={"rho_bar": 1.5}), tmp_path, ranks).critic
    episodes = random_group_episodes(4, 3, seed=1)
    taught_too = VTRACE.model_copy(update={"teacher": "t"})
    without, added = (
        prepare(
            tiny_policy(),
            pack(
                planned(episodes, settings),
                episodes,
                settings=settings,
                lineages={1: 0},
                lineage=1,
            ),
            settings=settings,
            ranks=ranks,
            critic=critic,
            teachers=[TEACHER] if settings is taught_too else [],
        )
        for settings in (VTRACE, taught_too)
    )

    weights = []
    for plain, taught in zip(without, added, strict=True):
        assert taught.log_teacher_N is not None and taught.log_prox_N is not None
        rho_N = (taught.log_prox_N - taught.microbatch.behaviour_logprobs_N).exp()
        gained_N = rho_N.clamp(max=1.5) * (taught.log_teacher_N - taught.log_prox_N)
        total_N = plain.microbatch.advantages_N + gained_N
        assert torch.allclose(taught.microbatch.advantages_N, total_N, atol=1e-5)
        weights += rho_N.tolist()
    assert min(weights) < 0.5 and max(weights) > 1.5


def test_whitening_leaves_the_teachers_advantages_as_they_are(ranks: Ranks) -> None:
    episodes = random_group_episodes(4, 3, seed=1)
    settings = ALONE.model_copy(update={"advantage": "reinforce_pp", "whiten": "batch"})
    none = [replace(episode, reward=1.0) for episode in episodes]

    constant = prepared_with(none, settings, [TEACHER], ranks)

    for each, plain in zip(constant, prepared_with(none, ALONE, [TEACHER], ranks), strict=True):
        assert torch.allclose(each.microbatch.advantages_N, plain.microbatch.advantages_N)


def test_actors_scores_are_read_from_the_record(ranks: Ranks) -> None:
    episodes = [
        make_episode(0, completion=[8, 9, 8], mask=[1, 0, 1], logprobs=[-1.0, 0.0, -2.0]),
        make_episode(1, group_id=1, completion=[8, 9], logprobs=[-3.0, -4.0]),
    ]
    for episode, values in zip(episodes, ([-0.5, 0.0, -0.25], [-1.5, -2.5]), strict=True):
        scored = replace(episode.completion, teacher_logprobs=np.array(values, dtype=np.float32))
        episodes[episode.task_id] = replace(episode, completion=scored)
    settings = ALONE.model_copy(update={"teacher_in": "actor"})

    prepared = prepared_with(episodes, settings, [], ranks)

    assert _in_order_of_tasks(prepared, episodes) == [-0.5, -0.25, -1.5, -2.5]
    by_name = settings.model_copy(update={"teacher": {"odd": "u"}})
    first, *_ = prepared_with(episodes, by_name, [], ranks)
    assert first.log_teacher_N is not None and int(first.log_teacher_N.isnan().sum()) == 2


def test_a_record_that_no_actor_has_scored_is_refused(ranks: Ranks) -> None:
    settings = ALONE.model_copy(update={"teacher_in": "actor"})

    with pytest.raises(
        RecordError, match=r"episode 0 must have teacher_logprobs where .* got none"
    ):
        prepared_with([make_episode(0)], settings, [], ranks)


def test_training_lowers_the_distance_to_both_teachers_that_is_shown(ranks: Ranks) -> None:
    """The prompt tells the policy which teacher it has; tokens are drawn from a uniform policy."""
    policy = tiny_policy(ranks.mesh)
    optimizer = ScheduledOptimizer(policy, constant_rate(3e-3), LearnerSettings())
    distances = []
    for step in range(1, 61):
        episodes = [_uniform(episode) for episode in random_group_episodes(8, 4, seed=step)]
        microbatches = pack(
            planned(episodes, BY_NAME, microbatch_tokens=400),
            episodes,
            settings=BY_NAME,
            lineages={1: 0},
            lineage=1,
        )
        trained = train_batch(
            policy,
            optimizer,
            step,
            microbatches,
            settings=BY_NAME,
            ranks=ranks,
            teachers=[TEACHER, OTHER],
        )
        assert trained.divergence.teacher_kl is not None
        distances.append(trained.divergence.teacher_kl)

    assert sum(distances[-5:]) < 0.3 * sum(distances[:5])


def _uniform(episode: Episode) -> Episode:
    mask = episode.completion.loss_mask
    return replace(
        episode,
        prompt_ids=np.array([3 + episode.group_id % 2], dtype=np.int32),
        completion=replace(
            episode.completion,
            behaviour_logprobs=np.where(mask == 1, -np.log(17), 0).astype(np.float32),
        ),
    )


def _run(folder: Path, teacher: Path) -> Settings:
    save_tiny_model(folder / "model")
    return Settings.model_validate(
        {
            "run": {"model": str(folder / "model"), "environment": "calculator"},
            "learner": {"device": "cpu"},
            "algorithm": {"teacher": str(teacher)},
        }
    )


def test_the_learner_loads_the_teacher_that_is_named(tmp_path: Path, ranks: Ranks) -> None:
    save_tiny_model(tmp_path / "teacher", seed=1, width=64)
    settings = _run(tmp_path, tmp_path / "teacher")

    loaded = load_teachers(settings, ranks, load_policy(settings, ranks))

    (teacher,) = loaded.policies
    assert teacher.causal_lm.config.hidden_size == 64
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert loaded.prompt is prompt_of_episode


def test_the_teacher_of_self_distillation_is_the_policy_without_its_adapters(
    tmp_path: Path, ranks: Ranks
) -> None:
    save_tiny_model(tmp_path / "model")
    settings = Settings.model_validate(
        {
            "run": {"model": str(tmp_path / "model"), "environment": "calculator"},
            "learner": {"device": "cpu", "lora_rank": 3},
            "algorithm": {"advantage": "none", "teacher_prompt": "hint"},
        }
    )
    policy = load_policy(settings, ranks, is_trained=True)
    episodes = random_group_episodes(2, 2, seed=1)
    plan = planned(episodes, settings.algorithm, microbatch_tokens=400)
    loaded = load_teachers(settings, ranks, policy)
    prompt_of = loaded.prompt
    (microbatch,) = pack(
        plan,
        episodes,
        settings=settings.algorithm,
        lineages={1: 0},
        lineage=1,
        teacher_prompt=prompt_of,
    )
    told = [replace(episode, prompt_ids=prompt_of(episode)) for episode in episodes]
    before = [each for episode in told for each in alone(policy, episode, ranks)]
    fill_adapters(policy)

    prepared = prepare(
        policy, [microbatch], settings=settings.algorithm, ranks=ranks, teachers=loaded.policies
    )

    assert loaded.policies == (policy,)
    assert _in_order_of_tasks(prepared, episodes) == pytest.approx(before, abs=1e-4)
    after = [each for episode in told for each in alone(policy, episode, ranks)]
    assert after != pytest.approx(before, abs=1e-2)
    assert len(prompt_of(episodes[0])) == len(episodes[0].prompt_ids) + len("hint")


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (0, r"tokenizer of run\.model, got .*, whose token 0 is 'a', not"),
        (1, "an embedding for each"),
    ],
)
def test_the_learner_refuses_a_teacher_of_other_tokens(
    tmp_path: Path, ranks: Ranks, lost: int, text: str
) -> None:
    tokenizer = save_tiny_model(tmp_path / "teacher")
    if lost:
        fewer = tiny_causal_lm(vocabulary=len(tokenizer) - lost)
        fewer.save_pretrained(tmp_path / "teacher")
    else:
        save_tokenizer(tmp_path / "teacher")
    settings = _run(tmp_path, tmp_path / "teacher")

    with pytest.raises(SettingsError, match=text):
        load_teachers(settings, ranks, load_policy(settings, ranks))
