"""`run`: what all roles share, with samples and traces; `console`: display and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Positive, Seconds, SettingsTable
from .environments import Mixture, OneEnvironment


class SampleSettings(SettingsTable):
    """Which episodes the learner keeps in `samples.jsonl`, and how many bytes of them."""

    every: Annotated[int, Field(ge=0)] = 10
    """Batches between two whose groups are kept; groups of the first batch are always kept. 0 =
    only answers of evaluations are kept.

    Lower it to read more of what the model writes."""
    groups: Positive = 4
    """Groups that are kept of such a batch, chosen at random, with all their episodes.

    Raise it to keep more of each such batch."""
    max_mb: Annotated[int, Field(ge=0)] = 256
    """Size of all files of samples together, MiB. Beyond it the oldest are deleted, those of the
    run's beginning last. 0 = nothing is kept.

    Lower it when the disk is small."""

    def has_batch(self, step: int) -> bool:
        """Whether groups of batch `step` are kept."""
        return bool(self.max_mb and self.every and (step == 1 or step % self.every == 0))


class TracingSettings(SettingsTable):
    """Traces of episodes over all processes, for a collector of OpenTelemetry."""

    endpoint: str | None = None
    """Address of the collector, such as `http://127.0.0.1:4318` (OTLP over HTTP); null = nothing is
    traced.

    Set it to see where single episodes spend their time."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Share of the episodes that are traced, the same ones in every process.

    Raise it to find rare episodes, lower it when a collector has too much to store."""


UNIFORM = "uniform"
"""The `run.sampler` under which each group asks the prompt of its own number."""
LIVE_AGENTS = "agent"
"""The `run.environment` whose conversations are held by processes that have loops of their own."""


class RunSettings(SettingsTable):
    """Settings that all roles share. An actor is refused if they differ, except names of files."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    """Name of the run: its folder under `directory` and its key prefix in Redis.

    Change it for each run: two runs of one name are one run."""
    directory: Path = Path("runs")
    """Folder in which runs are kept; this run writes to `directory/name`.

    Change it when runs should be stored on another disk."""
    seed: int = 0
    """Seed of the curriculum. The task of an id is a pure function of (seed, id), and of what was
    trained before unless `sampler` is `uniform`.

    Change it to repeat an experiment with other questions, or in another order."""
    deterministic: bool = False
    """Whether two runs of these settings are equal bit for bit, whichever actors die. Needs the
    small engine, `max_policy_lag: 0` and other settings; an error names one that is missing. Slow.

    Set it to true to find a defect, or to show what a change of the code changes."""
    model: str
    """Hugging Face model directory or hub name. `init` alone means `<run folder>/init`, which
    `nyala init-model` makes.

    Set it to the model that you want to train."""
    system_prompt: str | None = None
    """Message before each prompt, for chat models.

    Change it to tell the model which form of answer you want."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `enable_thinking: false` of Qwen3.

    Change it to use options of your model's template, such as thinking."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the published weights and of the actors' engines.

    Set it to `bfloat16` on GPUs."""
    head_dtype: Literal["float32"] | None = None
    """Data type of the logits, in learner and actors: with float32 the output layer computes with
    its bfloat16 weights in float32, so that the log-probs of both differ less; null = that of the
    model.

    Set it to `float32` when log-probs of learner and actors differ too much in bfloat16."""
    steps: Positive = 100
    """Batches to train in all.

    Set it to how long you want to train."""
    environment: str = "reasoning_gym"
    """`dataset`, `reasoning_gym`, `calculator`, `agent` for live agents, or a class of your own,
    also in gymnasium's or TRL's form: `path/to/file.py:Class` or `module:Class`.

    Change it for what you want to train on."""
    environment_settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords for the environment, such as `dataset: spell_backward`.

    Change it for the keywords of your environment."""
    environment_requirements: tuple[str, ...] = ()
    """Packages of the environment that conflict with Nyala's, in pip's form, such as
    `textarena>=0.7`. The environment then runs in a process and a virtual environment of its own,
    which uv makes.

    Change it when your environment's packages conflict with those installed here."""
    environment_python: str | None = None
    """Python of a virtual environment of yours for the environment; it must have what
    `environment_requirements` lists.

    Change it when you keep such a virtual environment yourself."""
    environments: Annotated[tuple[OneEnvironment, ...], Field(max_length=64)] = ()
    """Several environments instead of `run.environment`, each with `environment`,
    `environment_settings`, `name` and `share`, and optionally a `reward` and `eval_episodes` of its
    own.

    Change it to train on several environments at once."""
    reward: str | Annotated[list[str], Field(min_length=1)] | None = None
    """`path/to/file.py:function` or `module:function`; null means the environment's own score. The
    rewards of a list are added up; each is a part of the reward, with its function's name.

    Change it to judge answers by a function of your own."""
    reward_timeout_s: Seconds = 30.0
    """Longest time of a reward call; a longer one costs its episode an attempt.

    Raise it when a judgement takes longer, such as by a model or a sandbox."""
    sampler: Annotated[str, Field(pattern=r"^(uniform|difficulty|.+:.+)$")] = UNIFORM
    """Which prompt a new group asks: `uniform` takes one after the other, `difficulty` prefers
    those of which some answers are right, or a function of your own chooses:
    `path/to/file.py:function` or `module:function`.

    Set it to `difficulty` when many groups have equal rewards, because prompts are too easy or too
    hard."""
    sampler_prompts: Positive | None = None
    """Prompts of each environment that the sampler chooses among: its first ones. Required unless
    `run.sampler` is `uniform`.

    Set it to the number of training rows of your dataset (`nyala data check` counts them), or to
    how many questions of a generator are asked again and again."""
    group_size: Positive = 8
    """Episodes per prompt (GRPO-style baselines).

    Raise it when questions are hard and few answers are right, lower it when sampling is
    expensive."""
    groups_per_batch: Positive = 16
    """Groups one optimizer step trains on.

    Raise it when the gradient is noisy, lower it for more optimizer steps in the same time."""
    max_policy_lag: Annotated[int, Field(ge=0)] = 2
    """Most batches by which a token's policy may be older than the one that trains it;
    0 = synchronous.

    Raise it when answers are long or actors idle, lower it when off-policy data hurt."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt, tokens.

    Raise it when your prompts are longer."""
    max_completion_tokens: Positive = 1024
    """Longest completion, all turns and environment tokens together, tokens.

    Change it when answers are cut, or memory is short."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=16)
    ] = ()
    """Strings that end a turn like its end token. The tokens of such a string are trained; the text
    for environment and reward ends before it.

    Change it when a turn should end at a text, such as a closing tag."""
    temperature: Annotated[float, Field(gt=0, le=5)] = 1.0
    """Sampling temperature of training episodes; the learner applies the same.

    Raise it when answers of a group are all alike."""
    eval_every: Annotated[int, Field(ge=0)] = 25
    """Batches between evaluations; 0 = only before the first and after the last.

    Lower it for a finer curve, raise it when evaluations cost too much sampling."""
    eval_episodes: Annotated[int, Field(ge=0)] = 128
    """Held-out prompts per evaluation, sampled greedily, of each environment; 0 = none.

    Raise it for a smaller error of the held-out score."""
    eval_samples: Annotated[int, Field(ge=0, le=1024)] = 0
    """Answers to each held-out prompt beside the greedy one, sampled at `run.temperature`, for
    pass@k and their mean, avg@k.

    Change it when you want pass@k or avg@k."""
    eval_metric: str | None = None
    """Metric of held-out answers: the name of a part of the reward, or `reward` for all of it.
    null = the part `exact` where the environment's own score has one and is trained, else the
    reward.

    Set it to compare runs with different rewards, by `exact` or by a function's name."""
    samples: SampleSettings = SampleSettings()
    """Episodes that are kept as text: `every`, `groups`, `max_mb`; see `docs/watching.md`.

    See its keys."""
    tracing: TracingSettings = TracingSettings()
    """Traces of episodes: `endpoint`, `share`; see `docs/traces.md`.

    See its keys."""

    trusted_network: bool = False
    """Whether only this run's machines can read or write on the network between learner and actors.
    `learner.broadcast` needs it beyond loopback.

    Set it to true when the network is private to this run's machines, for faster weights."""

    @property
    def folder(self) -> Path:
        """Folder with the files of this run."""
        return self.directory / self.name

    @property
    def has_agents(self) -> bool:
        """Whether live agents hold conversations: only then may episodes branch."""
        return any(run.environment == LIVE_AGENTS for run in self.by_environment.values())

    @property
    def by_environment(self) -> dict[str, RunSettings]:
        """Name of each environment -> the run with that environment alone."""
        if not self.environments:
            return {self.environment.rpartition(":")[2]: self}
        alone = {}
        for environment in self.environments:
            changes: dict[str, Any] = {
                "environments": (environment,),
                "environment": environment.environment,
                "environment_settings": environment.environment_settings,
                "environment_requirements": environment.environment_requirements,
                "environment_python": environment.environment_python,
                "reward": self.reward if environment.reward is None else environment.reward,
                "sampler_prompts": environment.sampler_prompts or self.sampler_prompts,
            }
            if environment.eval_episodes is not None:
                changes["eval_episodes"] = environment.eval_episodes
            alone[environment.title] = self.model_copy(update=changes)
        return alone

    @property
    def is_trained(self) -> bool:
        """Whether anything is trained: an environment by itself may only be evaluated."""
        return not self.environments or any(
            environment.share > 0 for environment in self.environments
        )

    @property
    def mixture(self) -> Mixture:
        """The mixture that assigns each item to an environment."""
        alone = self.by_environment.values()
        return Mixture(
            self.seed,
            shares=[
                environment.share if self.is_trained else 1.0 for environment in self.environments
            ]
            or [1.0],
            eval_episodes=[run.eval_episodes for run in alone],
        )

    @property
    def reward_functions(self) -> dict[str, str]:
        """Name of each part of the reward -> the function that gives it."""
        functions = [self.reward] if isinstance(self.reward, str) else self.reward or []
        return {reward.rpartition(":")[2]: reward for reward in functions}

    @property
    def model_path(self) -> str:
        """The model to start from, with `init` resolved."""
        return str(self.folder / "init") if self.model == "init" else self.model


# --------------------------------------------------------------------------------------------------
# `console`: the display of `nyala up`, and its restarts.


class ConsoleSettings(SettingsTable):
    """The display of `nyala up`, and its restarts."""

    refresh_s: Seconds = 0.5
    """Pause between two updates of the display.

    Raise it over a slow terminal."""
    alarm_s: Seconds = 60.0
    """Time without episodes while no actor samples, after which learner, display and `nyala status`
    raise an alarm; longer if actors take longer to start.

    Raise it when an actor takes longer to start, such as with a large model."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts of one process within ten minutes before the run stops with an error.

    Raise it on machines where processes are often killed."""
    stop_timeout_s: Seconds = 30.0
    """Time for a process to end cleanly before it is killed.

    Raise it when a last checkpoint takes longer."""
