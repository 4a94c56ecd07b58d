"""The advisor: which rules hold after each batch, and which advice that gives.

silent --concludes, after `batches` batches--> holds --`CALM` batches without--> silent
"""

from __future__ import annotations

from collections.abc import Sequence

from configs.settings import Settings

from . import answer_rules, flow_rules, reward_rules, training_rules
from .evidence import Advice, Evidence, Rule, StoreFigures, Window

# --------------------------------------------------------------------------------------------------
# All rules, causes before consequences: the order in which advice is shown.

SYMPTOMS = frozenset({"reward_constant", "groups_flat"})
"""Rules that hold as a consequence of nearly any cause."""
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
        answer_rules.stop_string_early,
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
        "temperature_high",
        answer_rules.temperature_high,
        batches=3,
        explains=SYMPTOMS,
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
    Rule("tokens_masked", flow_rules.tokens_masked, batches=20),
    Rule("actor_slow", flow_rules.actor_slow, batches=20),
    Rule("learner_waits", flow_rules.learner_waits, batches=10),
    Rule("actors_wait", flow_rules.actors_wait, batches=10),
)


# --------------------------------------------------------------------------------------------------
# The advisor: which rules hold after each batch.

CALM = 3  # a single good batch between bad ones is no recovery


class Advisor:
    """Judges one batch after the other; pure, and called by a thread of its own.

    Args:
        settings: Settings of the run; texts name them with their values.
        rules: Rules in the order of the advice: causes before their consequences.
    """

    def __init__(self, settings: Settings, rules: Sequence[Rule] = RULES) -> None:
        self._settings = settings
        self._rules = rules
        self._window = Window()
        self._texts: dict[str, str] = {}
        """Rule that holds -> its newest text."""
        self._calm: dict[str, int] = {}
        """Rule that holds -> batches in a row in which it concluded nothing."""

    def consider(self, evidence: Evidence) -> tuple[Advice, ...]:
        """Take a batch, and return the advice that holds after it."""
        self._window.add(evidence)
        for rule in self._rules:
            self._judge(rule)
        return self._holding()

    def consider_store(self, store: StoreFigures) -> tuple[Advice, ...]:
        """Take the store's figures while no batch comes, and return the advice that holds then."""
        self._window.store = store
        for rule in self._rules:
            if not rule.batches:
                self._judge(rule)
        return self._holding()

    def _holding(self) -> tuple[Advice, ...]:
        explained = {
            name for rule in self._rules if rule.name in self._texts for name in rule.explains
        }
        return tuple(
            Advice(rule.name, self._texts[rule.name])
            for rule in self._rules
            if rule.name in self._texts and rule.name not in explained
        )

    def _judge(self, rule: Rule) -> None:
        if len(self._window) < rule.batches:
            return
        text = rule.conclude(self._window, self._settings, rule.name in self._texts)
        if text is not None:
            self._texts[rule.name] = text
            self._calm[rule.name] = 0
        elif rule.name in self._texts:
            self._calm[rule.name] += 1
            if self._calm[rule.name] == CALM:
                del self._texts[rule.name]
