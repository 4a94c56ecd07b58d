"""`nyala report`: its numbers are those of the files, and no text of a run can break the page."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from configs.errors import SettingsError
from console.main import app
from console.report.curve_charts import curve_chart
from console.report.drawing import MOST
from console.report.record import read_run
from console.report.run_charts import ZERO, ratio_histogram
from console.report.write import write_report
from learner.reporting.figures import OFF_POLICY
from tests.console.support.made_run import answers, made_run, metrics_row, write_lines

VOID = {"meta"}


class Page(HTMLParser):
    """The tables, texts and elements of a report."""

    def __init__(self, text):
        super().__init__()
        self.source = text
        self.elements = {}
        self.attributes = set()
        self.tables = []
        self.texts = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "an element is not closed"

    def handle_starttag(self, tag, attributes):
        self.elements.setdefault(tag, []).append(dict(attributes))
        self.attributes |= {name for name, _ in attributes}
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in {"td", "th"}:
            self.tables[-1][-1].append("")
        if tag == "data":
            self.tables[-1][-1][-1] = dict(attributes)["value"]

    def handle_startendtag(self, tag, attributes):
        self.elements.setdefault(tag, []).append(dict(attributes))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag

    def handle_data(self, text):
        self.texts.append(text)
        if self._open and self._open[-1] in {"td", "th"} and self.tables:
            self.tables[-1][-1][-1] += text

    @property
    def text(self):
        return "\n".join(self.texts)

    def table(self, column):
        """Find the table with this column, as rows by column."""
        (found,) = [table for table in self.tables if column in table[0]]
        return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def page_of(*folders):
    path = write_report(folders, folders[0].parent / "page.html")
    return Page(path.read_text(encoding="utf-8"))


def test_numbers_are_those_of_the_metrics(tmp_path):
    folder = made_run(tmp_path / "r", steps=5)

    rows = page_of(folder).table("Sampled reward")

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rows] == ["1", "2", "3", "4", "5"]
    for column, key in (
        ("Sampled reward", "reward_mean"),
        ("Loss", "loss"),
        ("Gradient norm", "grad_norm"),
        ("Learning rate", "learning_rate"),
    ):
        assert [float(row[column]) for row in rows] == [line[key] for line in lines]
    speeds = page_of(folder).table("Tokens per second")
    assert [row["Tokens per second"] for row in speeds] == ["-", "150.0", "150.0", "150.0", "150.0"]


def test_a_long_run_is_drawn_by_means_and_stays_small(tmp_path):
    folder = made_run(tmp_path / "r", steps=1000)

    path = write_report([folder])

    assert path == folder / "report.html"
    assert path.stat().st_size < 1_000_000
    rows = Page(path.read_text(encoding="utf-8")).table("Loss")
    assert len(rows) <= MOST
    assert rows[1]["batch"] == "8-14"
    mean = math.fsum(-1 / (step + 2) for step in range(8, 15)) / 7
    assert float(rows[1]["Loss"]) == pytest.approx(mean, rel=1e-12)


def test_no_text_of_a_run_breaks_the_page(tmp_path):
    evil = (
        "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x1b[31mred\u202e"
    )
    folder = made_run(
        tmp_path / "r",
        metrics=lambda step: {
            "episodes_by_actor": {evil: 3},
            "alerts": [evil],
            "advice": [{"rule": "r", "text": evil}],
        },
        environment_settings={"dataset": evil},
    )
    for step, grade in ((0, 0.0), (4, 1.0)):
        notes = {"notes": {"answer": evil}, "finish": evil, "prompt": evil}
        answers(folder, step=step, grades={evil: grade}, text=evil, **notes)
    write_lines(
        folder / "logs" / "audit.jsonl",
        [{"time": "2027-01-15T08:00:00+00:00", "event": "actor joined", "actor": evil}],
    )

    page = page_of(folder)

    assert not page.elements.keys() & {"script", "img", "iframe", "link", "object", "base", "form"}
    assert (
        not {name for name in page.attributes if name.startswith("on")} | {"src"} & page.attributes
    )
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert "\x1b" not in page.source
    assert "\u202e" not in page.source
    assert r"\x1b[31mred\u202e" in page.text
    (policy,) = [m for m in page.elements["meta"] if "http-equiv" in m]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_charts_have_titles_and_descriptions(tmp_path):
    page = page_of(made_run(tmp_path / "r"))

    charts = [svg for svg in page.elements["svg"] if svg.get("role") == "img"]
    named = {each["id"] for tag in ("title", "desc") for each in page.elements[tag] if "id" in each}
    assert len(charts) >= 14
    assert {name for svg in charts for name in svg["aria-labelledby"].split()} == named
    assert "reward: 0.1429 at 1, 0.5714 at 4, lowest 0.1429, highest 0.5714" in page.text


def test_an_abandoned_branch_and_half_a_line_are_not_drawn(tmp_path):
    folder = made_run(tmp_path / "r", steps=4)
    write_lines(folder / "metrics.jsonl", [metrics_row(3, loss=9.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": ')

    rows = page_of(folder).table("Loss")

    assert [(row["batch"], float(row["Loss"])) for row in rows][2:] == [("3", 9.0)]


def test_a_figure_without_a_value_is_a_gap(tmp_path):
    folder = made_run(tmp_path / "r", metrics=lambda step: {"loss": None if step == 2 else 0.5})

    page = page_of(folder)

    assert [row["Loss"] for row in page.table("Loss")] == ["0.5", "-", "0.5", "0.5"]
    assert "nan" not in page.source


def test_a_run_whose_ratios_are_all_1_is_drawn(tmp_path):
    ones = {"ratio_percentiles": dict.fromkeys(("1", "5", "25", "50", "75", "95", "99"), 1.0)}

    assert "Importance ratios" in page_of(made_run(tmp_path / "r", metrics=lambda _: ones)).text


def test_ratios_of_the_first_and_the_last_quarter_stand_side_by_side(tmp_path):
    folder = made_run(tmp_path / "r", steps=8)

    chart = ratio_histogram(read_run(folder))

    # Of 200 tokens each of batches 1 to 2 and 7 to 8, as `metrics_row` counts them.
    assert chart is not None
    assert [key.label for key in chart.legend] == ["batches 1 to 2", "batches 7 to 8"]
    assert chart.summary == (
        "batches 1 to 2: 80.0% within 0.001 of 0, 15.0% beyond 0.1; "
        "batches 7 to 8: 20.0% within 0.001 of 0, 15.0% beyond 0.1"
    )
    texts = {spot.text.partition("\n")[0]: spot.text for spot in chart.spots}
    assert texts["log ratio 0.03 to 0.1"].endswith("1 to 2: 5.0%\nbatches 7 to 8: 65.0%")
    assert texts["log ratio -0.3 to -0.1"].endswith("1 to 2: 15.0%\nbatches 7 to 8: 15.0%")
    assert texts.keys() > {"log ratio below -3", "log ratio above 3"}
    tallest = [float(re.findall(r"V([\d.]+)H", shape.path)[0]) for shape in chart.shapes]
    assert tallest.index(min(tallest)) == ZERO, "that of 80 % early"
    assert "Importance ratios, early and late" in page_of(folder).text


@pytest.mark.parametrize("steps", [1, 4])
def test_a_run_without_a_histogram_of_ratios_has_no_chart_of_it(tmp_path, steps):
    older = {"log_ratio_histogram": {} if steps > 1 else {"0": 5}}

    page = page_of(made_run(tmp_path / "r", steps=steps, metrics=lambda _: older))

    assert "Importance ratios, early and late" not in page.text
    assert "Importance ratios" in page.text


def test_answers_to_the_same_question_stand_side_by_side(tmp_path):
    folder = made_run(tmp_path / "r")
    grades = {"up": 0.0, "down": 1.0, "right": 1.0, "wrong": 0.25}
    answers(folder, step=0, grades=grades, text="early words")
    answers(folder, step=4, grades={**grades, "up": 1.0, "down": 0.5}, text="late words")

    text = page_of(folder).text

    assert "Of 4 questions that were asked after 0 and after 4 batches, 1 were answered" in text
    assert "1 worse and 2 alike" in text
    assert (text.count("early words"), text.count("late words")) == (4, 4)
    assert "held-out accuracy from 0.562 to 0.688" in text


def test_several_runs_share_charts_and_show_where_their_settings_differ(tmp_path):
    one = made_run(tmp_path / "one", learner={"lr": 3e-6})
    two = made_run(tmp_path / "two", steps=6)

    page = page_of(one, two)

    assert page.texts.count("Learning rate") == 4  # heading and title of one chart, two tables
    assert page.texts.count("Policy lag of trained tokens: two") == 2
    changed = {row["setting"]: row for row in page.table("setting")}
    assert changed["run.directory"]["one"] == str(tmp_path)
    assert (changed["learner.lr"]["one"], changed["learner.lr"]["two"]) == ("3e-06", "1e-06")
    assert len([table for table in page.tables if "Loss" in table[0]]) == 2


def test_the_legend_of_several_runs_has_each_run_and_each_figure_once(tmp_path):
    runs = [read_run(made_run(tmp_path / name)) for name in ("one", "two")]
    clipped = next(figure for figure in OFF_POLICY if figure.title == "Clipped tokens")

    chart = curve_chart(clipped, runs)

    assert chart is not None
    assert [(key.style, key.label) for key in chart.legend] == [
        ("line c0", "one"),
        ("line c1", "two"),
        ("line c7 d0", "below the lower bound"),
        ("line c7 d1", "above the upper bound"),
    ]


def test_the_verb_writes_where_it_is_told(tmp_path):
    made_run(tmp_path / "r")

    done = CliRunner().invoke(app, ["report", str(tmp_path / "r"), "-o", str(tmp_path / "p.html")])

    assert done.exit_code == 0, done.output
    assert (tmp_path / "p.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_run_without_a_batch_is_refused(tmp_path):
    folder = made_run(tmp_path / "r", steps=0)

    with pytest.raises(SettingsError, match="must have trained a batch"):
        write_report([folder])
