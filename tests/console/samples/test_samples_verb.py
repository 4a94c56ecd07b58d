"""`nyala samples`: what is chosen, and what a terminal gets of it."""

import io
import json
from random import Random

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from configs.errors import SettingsError
from configs.loader import save
from configs.settings import RunSettings, Settings
from console.main import app
from console.samples.command import print_samples, print_side_by_side
from console.samples.query import Pick, Query, Steps, choose, follow, parse_steps
from learner.reporting.samples import SampleFiles, SampleLine, SampleTurn, encoded


def sample(step=1, task=0, *, reward=0.0, question="aa", text="cba", **fields):
    usual = {
        "step": step,
        "lineage": 1,
        "kind": "train",
        "environment": "spell",
        "sample": None,
        "group": task // 2,
        "task": task,
        "question": question,
        "prompt": f"spell {question}",
        "turns": [SampleTurn("policy", text, 3)],
        "reward": reward,
        "parts": {"exact": -reward},
        "metrics": {"num_turns": 1.0},
        "finish": "stop",
        "actor": f"host-{task % 2}-ff",
        "versions": [(1, step - 1, 0)],
        "logprobs": "ALgAuAC4",
        "trained_tokens": 3,
        "started": 1.0,
        "finished": 3.5,
        "notes": {"answer": "abc"},
    }
    return SampleLine(**{**usual, **fields})


HISTORY = [sample(step, task, reward=task + step / 10) for step in (1, 10, 20) for task in range(6)]


def chosen(n=2, lines=HISTORY, **query):
    found = choose(lambda: lines, Query(**query), n=n, random=Random(0))
    return [(line.step, line.task) for line in found.samples], found.fitting


def test_the_best_and_the_worst_of_the_newest_step_are_chosen():
    assert chosen(pick=Pick.BEST) == ([(20, 5), (20, 4)], 6)
    assert chosen(pick=Pick.WORST) == ([(20, 0), (20, 1)], 6)


def test_greedy_answers_are_not_ranked_among_sampled_ones():
    greedy = [sample(20, task, kind="eval", sample=0, reward=99.0) for task in (7, 8)]
    lines, everything = [*HISTORY, *greedy], Steps(0, 99)

    assert chosen(lines=lines, pick=Pick.BEST, steps=everything) == ([(20, 5), (10, 5)], 18)
    assert chosen(lines=lines, pick=Pick.BEST, kind="eval") == ([(20, 7), (20, 8)], 2)
    assert chosen(lines=greedy, pick=Pick.WORST) == ([(20, 7), (20, 8)], 2)
    assert chosen(None, lines, steps=everything)[1] == 20


def test_a_branch_is_named_at_its_first_turn_and_turns_by_their_tokens():
    turns = [SampleTurn("policy", "ab", 2), SampleTurn("policy", "cd", 2, branch=1)]
    output = io.StringIO()
    console = Console(file=output, width=80)

    print_samples(console, [sample(turns=turns)], full=True)
    print_side_by_side(console, [sample(turns=turns), sample()], full=True)

    assert output.getvalue().count("policy, tokens 1 to 2\n") == 1
    assert output.getvalue().count("policy, tokens 3 to 4, branch from token 1") == 1
    assert " ".join(output.getvalue().split()).count("tokens 3 to 4, branch from") == 2


def test_a_part_of_the_reward_ranks_in_its_place():
    assert chosen(pick=Pick.BEST, part="exact") == ([(20, 0), (20, 1)], 6)
    assert chosen(lines=[*HISTORY, sample(99, parts={})], part="exact")[1] == 6


def test_samples_fit_by_step_kind_finish_actor_and_environment():
    lines = [
        *HISTORY,
        sample(20, 7, kind="eval", sample=0),
        sample(20, 8, finish="length"),
        sample(20, 9, environment="sums"),
    ]
    everything = Steps(0, 99)

    assert chosen(None, lines, steps=Steps(10, 10)) == ([(10, task) for task in range(6)], 6)
    assert chosen(None, lines, steps=everything, kind="eval") == ([(20, 7)], 1)
    assert chosen(None, lines, steps=everything, finish="length") == ([(20, 8)], 1)
    assert chosen(None, lines, steps=everything, environment="sums") == ([(20, 9)], 1)
    assert {task % 2 for _, task in chosen(None, lines, actor="host-1")[0]} == {1}


def test_random_samples_are_all_equally_likely():
    draws = Random(7)
    counts = dict.fromkeys(range(6), 0)
    for _ in range(600):
        for line in choose(lambda: HISTORY, Query(), n=2, random=draws).samples:
            counts[line.task] += 1

    assert all(150 < count < 250 for count in counts.values())  # 200, 5 standard deviations: 58


def test_few_of_many_lines_are_held():
    many = (sample(1, task, reward=task % 997) for task in range(3000))

    assert chosen(lines=many, pick=Pick.BEST) == ([(1, 996), (1, 1993)], 3000)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("50", Steps(50, 50)),
        ("..60", Steps(0, 60)),
        ("20..", Steps(20, 2**53)),
        ("all", Steps(0, 2**53)),
        ("newest", None),
    ],
)
def test_steps_are_read(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["x", "1..x", "-1", "", "1.5"])
def test_other_steps_are_refused(text):
    with pytest.raises(SettingsError, match="--step must be a step, a range or a word, got"):
        parse_steps(text)


def followed(prompt, n=3, **query):
    lines = [sample(step, 0, question="bb", reward=step) for step in range(0, 100, 10)]
    lines += [
        sample(step, 1, question="aa", kind="eval", sample=s) for step in (0, 90) for s in (1, 0)
    ]
    asked = Query(steps=Steps(0, 99), **query)
    found = follow(lambda: lines, asked, prompt=prompt, n=n, random=Random(0))
    return [(line.step, line.question, line.sample) for line in found.samples], found.fitting


def test_a_question_is_followed_over_steps_with_the_first_and_the_last():
    assert followed("any") == ([(0, "bb", None), (40, "bb", None), (90, "bb", None)], 10)
    assert followed("bb", n=1) == ([(90, "bb", None)], 10)
    assert followed("any", n=None)[0] == [(step, "bb", None) for step in range(0, 100, 10)]


def test_of_an_evaluation_the_greedy_answer_is_followed():
    assert followed("spell aa") == ([(0, "aa", 0), (90, "aa", 0)], 2)
    assert followed("any", kind="eval") == ([(0, "aa", 0), (90, "aa", 0)], 2)


def test_what_does_not_fit_is_answered_with_what_there_is():
    with pytest.raises(
        SettingsError,
        match=r"no sample fits among the 18 kept; ask for what these have: kind train; part exact;"
        r" .*step 1\.\.20",
    ):
        chosen(finish="length")
    with pytest.raises(
        SettingsError, match="no sample that fits has 'zz' in its prompt among the 14 kept"
    ):
        followed("zz")
    with pytest.raises(SettingsError, match="must have kept samples, got none; wait for its first"):
        chosen(lines=[])


def printed(show, samples, *, width, full=False):
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=False), samples, full=full)
    return out.getvalue()


LONG = "\n".join(f"line {number} " + "word " * 30 for number in range(40))
HOSTILE = "[red]a\x1b[2J\x9b31m\x07\u202eb\r\t日本語"


@pytest.mark.parametrize("show", [print_samples, print_side_by_side])
@pytest.mark.parametrize("width", [60, 80, 140])
def test_samples_are_legible_at_any_width_without_colour(show, width):
    samples = [sample(step, 0, reward=0.25, text=LONG) for step in (0, 10, 20)]

    text = printed(show, samples, width=width)

    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    for words in (
        "step 20, trained,",
        "reward",
        "line 0",
        "word",
        "more lines: --full]",
        "exact",
    ):
        assert words in text
    whole = printed(show, samples, width=width, full=True)
    assert "more lines" not in whole
    assert all(f"line {number}" in whole for number in range(40))


@pytest.mark.parametrize("show", [print_samples, print_side_by_side])
def test_what_a_terminal_would_obey_is_written_out(show):
    names = {"parts": {HOSTILE: 1.0}, "metrics": {HOSTILE: 1.0}, "notes": {HOSTILE: HOSTILE}}
    turns = [SampleTurn("policy", HOSTILE, 1), SampleTurn("environment", HOSTILE, 1)]
    hostile = sample(prompt=HOSTILE, actor=HOSTILE, environment=HOSTILE, turns=turns, **names)

    text = printed(show, [hostile], width=140)

    assert not set(text) & set("\x1b\x9b\x07\u202e\r\t")
    assert "[red]a\\x1b[2J\\x9b31m\\x07\\u202eb\\r\\t日本語" in text


def test_a_run_is_asked_from_the_command_line(tmp_path):
    settings = Settings(run=RunSettings(model="init", name="r", directory=tmp_path))
    save(settings, settings.run.folder / "config.yaml")
    folder = settings.run.folder

    def ask(*arguments):
        return CliRunner().invoke(app, ["samples", str(folder), *arguments])

    assert "must have kept samples, got none" in ask().stderr
    files = SampleFiles(folder, max_bytes=2**20)
    files.rewind(0)
    files.append(encoded([*HISTORY, sample(20, 6, text=HOSTILE, reward=9.0)]))

    shown = ask("--best", "-n", "1")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("1 of 7 samples that fit, the best\nstep 20, trained, reward 9")
    lines = [json.loads(line) for line in ask("--best", "--json", "--all").stdout.splitlines()]
    assert [line["task"] for line in lines] == list(range(7))
    assert lines[-1]["text"] == HOSTILE
    assert lines[-1]["logprobs"] == [-0.5, -0.5, -0.5]
    assert ask("--json", "--best").stdout.isascii()
    assert "3 of 3 steps" in ask("--follow-prompt", "any").stdout
    assert "must be given one at a time, got both" in ask("--best", "--worst").stderr
