"""All rules, causes before consequences: the order in which advice is shown."""

from __future__ import annotations

from . import answer_rules, flow_rules, reward_rules, stop_rules, training_rules
from .rule import Rule

SYMPTOMS = frozenset({"reward_constant", "groups_flat"})
"""What nearly any cause leads to."""
OF_ANSWERS = SYMPTOMS | {"answers_not_read"}

RULES: tuple[Rule, ...] = (
    Rule(
        "reward_failing",
        reward_rules.reward_failing,
        batches=2,
        explains=frozenset({"dead_letters_grow", "learner_waits"}),
    ),
    Rule(
        "leasing_paused",
        flow_rules.leasing_paused,
        batches=0,
        explains=frozenset({"dead_letters_grow", "learner_waits", "actors_wait"}),
    ),
    Rule(
        "prompt_left_open",
        answer_rules.prompt_left_open,
        batches=2,
        explains=OF_ANSWERS | {"stop_token_ignored", "answers_cut_off"},
    ),
    Rule(
        "stop_token_ignored",
        answer_rules.stop_token_ignored,
        batches=2,
        explains=OF_ANSWERS | {"answers_cut_off"},
    ),
    Rule(
        "stop_string_early",
        stop_rules.stop_string_early,
        batches=3,
        explains=OF_ANSWERS,
    ),
    Rule(
        "engine_disagrees",
        training_rules.engine_disagrees,
        batches=3,
        explains=frozenset({"learning_rate_high", "lag_high"}),
    ),
    Rule(
        "temperature_low",
        answer_rules.temperature_low,
        batches=2,
        explains=SYMPTOMS | {"entropy_gone", "learning_rate_high", "lag_high"},
    ),
    Rule(
        "learning_rate_high",
        training_rules.learning_rate_high,
        batches=3,
        explains=OF_ANSWERS
        | {"lag_high", "entropy_gone", "answers_cut_off", "groups_dropped", "stop_token_ignored"},
    ),
    Rule("answers_cut_off", answer_rules.answers_cut_off, batches=3, explains=OF_ANSWERS),
    Rule("answers_not_read", reward_rules.answers_not_read, batches=3, explains=SYMPTOMS),
    Rule("clip_bounds_odd", training_rules.clip_bounds_odd, batches=3),
    Rule("actor_unlike_others", reward_rules.actor_unlike_others, batches=4),
    Rule("entropy_gone", training_rules.entropy_gone, batches=5, explains=SYMPTOMS),
    Rule("lag_high", training_rules.lag_high, batches=5),
    Rule(
        "reward_constant",
        reward_rules.reward_constant,
        batches=5,
        explains=frozenset({"groups_flat"}),
    ),
    Rule("groups_flat", reward_rules.groups_flat, batches=10),
    Rule("dead_letters_grow", flow_rules.dead_letters_grow, batches=3),
    Rule("groups_dropped", flow_rules.groups_dropped, batches=20),
    Rule("actor_slow", flow_rules.actor_slow, batches=20),
    Rule("learner_waits", flow_rules.learner_waits, batches=10),
    Rule("actors_wait", flow_rules.actors_wait, batches=10),
)
