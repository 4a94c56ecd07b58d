"""The live view at 60, 80 and 140 columns, from a recorded run."""

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from buffer.operations.values import ActorSeen
from console.display.live_view import live_view
from console.display.progress import Progress
from console.display.snapshot import GONE_SHOWN_S, GroupsInFlight, View
from learner.phase_names import PHASES
from tests.console.support.recorded_run import recorded_view, rows

WIDTHS = [60, 80, 140]
RECENT = rows()[-20:]


def lines_of(view, width=80, height=40, **options):
    shown = live_view(view, name="demo", width=width, height=height, **options)
    assert len(shown) <= height
    assert max(cell_len(line.plain) for line in shown) <= width
    return [line.plain.rstrip() for line in shown]


def text_of(view, width=80, height=40, **options):
    return "\n".join(lines_of(view, width, height, **options))


def actor(name, silent_s=1.0, **fields):
    return ActorSeen(name, silent_s, {key: str(value) for key, value in fields.items()})


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_figures_are_those_of_the_files(width):
    shown = text_of(recorded_view(), width)

    newest, evaluations = rows()[-1], rows("eval")
    span_s = RECENT[-1]["wall_s"] - RECENT[0]["wall_s"]
    for text in (
        "batch 47 of 120",
        f"reward    {mean([row['reward_mean'] for row in RECENT]):.3f}",
        f"accuracy  {evaluations[-1]['accuracy']:.3f}",
        f"{sum(row['completion_tokens'] for row in RECENT[1:]) / span_s:,.0f} generated",
        f"{sum(row['trained_tokens'] for row in RECENT[1:]) / span_s:,.0f} trained",
        f"lag       {newest['policy_lag_mean']:.2f} batches, at most {newest['policy_lag_max']}",
        f"dropped groups: {newest['dropped_groups']['stale']} stale",
    ):
        assert text in shown


def test_generated_and_trained_tokens_have_a_speed_each():
    view = recorded_view()
    view = replace(view, progress=replace(view.progress, trained_tokens_per_s=1234.4))

    assert f"{view.progress.tokens_per_s:,.0f} generated, 1,234 trained" in text_of(view, 60)


def test_the_learners_time_is_shared_out_among_its_phases():
    spent = {name: sum(row[f"{name}_s"] for row in RECENT) for name in PHASES}
    shares = {name: f"{name} {spent[name] / sum(spent.values()):.0%}" for name in spent}
    others = sorted(set(spent) - {"wait"}, key=spent.__getitem__, reverse=True)

    line = next(each for each in lines_of(recorded_view(), 140, 40) if each.startswith("learner"))

    first = ", ".join(shares[name] for name in ["wait", *others[:2]])
    assert line.startswith(f"learner   {first}")


@pytest.mark.parametrize("width", WIDTHS)
def test_each_actor_has_a_line_with_its_speed_cores_memory_and_last_sign_of_life(width):
    view = recorded_view()
    used = {"cores": "0.83", "memory_bytes": str(6.7 * 2**30)}
    view = replace(view, actors=tuple(a._replace(fields=a.fields | used) for a in view.actors))

    shown = lines_of(view, width)

    first = next(line for line in shown if "actor-0-8fd5b395" in line)
    assert "453" in first
    assert "0.8" in first.split()
    assert ("6.7" in first.split()) == (width == 80)  # from 128 columns on the text is beside it
    assert first.endswith("1 s ago")
    assert ("172 of 272" in first) == (width >= 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_buffer_and_a_text_are_shown(width):
    shown = text_of(recorded_view(), width)

    assert "32 of 48 groups, 15 sampling, 17 waiting" in shown
    assert "batch 40, held out, reward 1, stop" in shown
    assert "prompt  simaba>" in shown
    assert "answer  abamis<eos>" in shown


@pytest.mark.parametrize("width", [*WIDTHS, 24, 300])
@pytest.mark.parametrize("height", [6, 12, 24, 60])
def test_nothing_is_wider_or_higher_than_the_terminal(width, height):
    sample = recorded_view().sample
    long = replace_sample(sample, prompt="what is this? " * 200, text="答えは " * 900 + "42")
    view = recorded_view(
        sample=long,
        actors=tuple(
            actor(f"a-rather-long-name-of-an-actor-{n}", host="別" * 40) for n in range(64)
        ),
        alarm="nobody samples " * 30,
        closed=("leasing is paused: " + "x" * 300,),
    )

    lines_of(view, width, height)
    lines_of(
        replace(view, is_training=False, stages={"actor-0" * 30: "loading " * 40}), width, height
    )


def replace_sample(sample, *, prompt, text):
    turn = type(sample.turns[0])("policy", text, 900)
    return type(sample)(
        **{name: getattr(sample, name) for name in sample.__struct_fields__}
        | {"prompt": prompt, "turns": [turn]}
    )


def test_a_long_text_shows_its_beginning_and_its_end():
    long = replace_sample(recorded_view().sample, prompt="?", text="first " * 200 + "the end")

    shown = text_of(recorded_view(sample=long))

    assert "answer  first first" in shown
    assert "…" in shown
    assert shown.rstrip().endswith("the end")


def test_actors_without_room_are_counted_and_silent_ones_come_last():
    fleet = tuple(
        actor(f"actor-{n:02d}", tokens_per_s=100, capacity=4, in_flight=1) for n in range(40)
    )
    fleet = (actor("a-gone", silent_s=90.0), *fleet)

    shown = lines_of(recorded_view(actors=fleet, actors_alive=40, sample=None), 80, 24)

    assert "actors    40, 1 died" in "\n".join(shown)
    named = sum("actor-" in line for line in shown)
    assert shown[-1] == f"  and {41 - named} more, {100 * (40 - named):,} tokens/s"
    all_of_them = lines_of(recorded_view(actors=fleet, actors_alive=40, sample=None), 80, 60)
    assert "a-gone" in all_of_them[-1]
    assert "silent" in all_of_them[-1]
    assert "1:30 min ago" in all_of_them[-1]


def test_hosts_of_agents_are_counted_beside_actors_where_a_run_has_agents():
    view = recorded_view(actors=(actor("a-here"),), actors_alive=1, sample=None)

    assert "of agents" not in text_of(view, 110, 60)
    assert "actors    1, 2 hosts of agents" in text_of(replace(view, hosts=2), 110, 60)


def test_ended_actors_are_named_by_their_end_and_leave_the_list_after_a_while():
    died, left = actor("a-dead", silent_s=90.0), actor("a-left", silent_s=2.0, left="1")
    long_ago = [actor(f"a-old-{n}", silent_s=GONE_SHOWN_S + 1) for n in range(6)]
    view = recorded_view(actors=(actor("a-here"), died, left, *long_ago), actors_alive=1)

    shown = text_of(replace(view, sample=None), 110, 60)

    assert "actors    1, 7 died, 1 left" in shown
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  a-")}
    assert {*rows} == {"a-here", "a-dead", "a-left"}
    assert "silent" in rows["a-dead"]
    assert " left " in rows["a-left"]


def test_warnings_stand_in_words_and_stay_where_there_is_little_room():
    view = recorded_view(alarm="no actor was heard at all", closed=("leasing is paused: mend it",))
    view = replace(view, progress=replace(view.progress, alerts="kl at batch 46"))

    for height in (14, 40):
        shown = text_of(view, 60, height)
        assert "ALARM     no actor was heard at all" in shown
        assert "CLOSED    leasing is paused: mend it" in shown
        assert "ALERT     kl at batch 46" in shown


def test_a_pause_is_shown_once_up_to_its_remedy():
    remedy = "mend the cause, then: nyala buffer"
    paused = f"leasing is paused: {'the reward raised KeyError ' * 8}; {remedy}"
    both = recorded_view(alarm=paused, closed=(paused, "the key a gets no leases"))

    shown = text_of(both, 60, 40)

    assert " ".join(shown.split()).count("leasing is paused") == 1
    assert "then: nyala buffer" in " ".join(
        text_of(recorded_view(closed=(paused,)), 60, 40).split()
    )
    assert "CLOSED    the key a gets no leases" in shown


def test_advice_is_shown_up_to_its_remedy():
    text = " ".join(["answers are cut off"] * 14) + ": raise run.max_completion_tokens"
    view = recorded_view()
    view = replace(view, progress=replace(view.progress, advice={"answers_cut_off": text}))

    shown = text_of(view, 80, 40)

    assert "ADVICE    answers are cut off" in shown
    assert "raise run.max_completion_tokens" in shown


def test_what_an_actor_sent_is_written_out():
    evil = actor("actor\x1b[2J", host="h\nost", version="1.\x07")
    bad = replace_sample(recorded_view().sample, prompt="\x1b[31mred", text="a\u202eb")

    shown = text_of(recorded_view(actors=(evil,), sample=bad), 140)

    assert "actor\\x1b[2J on h\\nost" in shown
    assert "\\x1b[31mred" in shown
    assert "a\\u202eb" in shown


def test_each_process_says_what_it_is_doing_while_the_run_starts():
    stages = {"broker": "listening", "learner": "importing torch", "actor-0": "loading the engine"}
    view = View(Progress(0, 120), stages, 0, is_training=False, elapsed_s=75.4)

    for width in WIDTHS:
        shown = lines_of(view, width)
        assert shown[0].startswith("demo  batch 0 of 120")
        assert shown[0].endswith("starting, 1:15 min")
        assert shown[1:] == [
            "broker    listening",
            "learner   importing torch",
            "actor-0   loading the engine",
        ]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_sampled_is_counted_until_the_first_batch(width):
    begun = {"tokens": "12480.0", "in_flight": "64.0", "finished": "87.0"}
    view = View(
        Progress(6, 120),
        {"actor-0": "sampling"},
        1,
        is_training=False,
        actors=(actor("actor-0", **begun), actor("gone", silent_s=99.0, tokens=10**9)),
        silent_after_s=5.0,
        fill=GroupsInFlight(sampling=5, waiting=2, claimed=1, admitted=24, memory=0.0, batch=8),
    )

    parts = ["3 of 8 groups complete", "12,480 tokens sampled", "87 episodes finished"]
    last = lines_of(view, width)[-1]
    assert last.startswith("batch 7   " + ", ".join(parts[: 2 if width == 60 else 3]))
    assert last.endswith("64 in flight") == (width == 140)
    assert lines_of(replace(view, actors=()), width)[-1] == "actor-0   sampling"
    fill = GroupsInFlight(sampling=5, waiting=2, claimed=1, admitted=24, memory=0.0, batch=0)
    elsewhere = replace(view, fill=fill)  # the broker names no batch
    assert "batch 7   12,480 tokens sampled, 87 episodes finished" in lines_of(elsewhere, width)[-1]


@pytest.mark.parametrize("width", WIDTHS)
def test_without_colour_or_block_characters_nothing_is_lost(width):
    plain = io.StringIO()
    bare = Console(file=plain, width=width, no_color=True, force_terminal=True)
    for line in live_view(recorded_view(), name="demo", width=width, height=24):
        bare.print(line, no_wrap=True, overflow="crop", highlight=False)

    for code in (30, 31, 32, 33, 34, 35, 36, 37):
        assert f"\x1b[{code}m" not in plain.getvalue()
        assert f";{code}m" not in plain.getvalue()
    ascii_text = text_of(recorded_view(), width, ascii_only=True)
    assert ascii_text.isascii()
    assert "32 of 48 groups" in ascii_text


def test_much_advice_leaves_room_for_the_run():
    view = recorded_view()
    advice = {f"rule-{n}": f"cause {n}: " + "mend it " * 40 for n in range(9)}
    view = replace(view, progress=replace(view.progress, advice=advice), alarm="nobody samples")

    shown = lines_of(view, 80, 24)

    assert any(line.startswith("ALARM     nobody samples") for line in shown)
    assert any(line.startswith("ADVICE    cause 0") for line in shown)
    assert any("more in the learner's log" in line for line in shown)
    assert any(line.startswith("actors    2") for line in shown)
