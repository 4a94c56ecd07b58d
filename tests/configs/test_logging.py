"""Log lines, as another process would read them: each test starts a real one."""

import json
import subprocess
import sys


def lines_of(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == ""
    return [json.loads(line) for line in done.stderr.splitlines()], done.returncode


def test_every_line_is_json_that_says_who_wrote_it():
    lines, code = lines_of(
        "import logging, threading, warnings, structlog\n"
        "from configs.logging import bind_version, configure_logging\n"
        "configure_logging('actor', run='demo', incarnation='host-1')\n"
        "log = structlog.get_logger()\n"
        "log.info('starting', stage='importing vLLM')\n"
        "bind_version('1.12')\n"
        "logging.getLogger('some.library').warning('careful: %s', 3)\n"
        "warnings.warn('old')\n"
        "thread = threading.Thread(target=log.info, args=('from a thread',))\n"
        "thread.start(); thread.join()\n"
    )

    assert code == 0
    assert [line["event"] for line in lines][:2] == ["starting", "careful: 3"]
    assert lines[0]["stage"] == "importing vLLM"
    assert "version" not in lines[0]
    assert lines[3]["event"] == "from a thread"
    for line in lines:
        assert (line["role"], line["run"], line["incarnation"]) == ("actor", "demo", "host-1")
        assert line["timestamp"].endswith("Z")
    assert all(line["version"] == "1.12" for line in lines[1:])
    assert [line["level"] for line in lines[:2]] == ["info", "warning"]


def test_vllm_and_lines_below_the_level_are_quiet():
    lines, _ = lines_of(
        "import logging, os, structlog\n"
        "from configs.logging import configure_logging\n"
        "configure_logging('actor')\n"
        "logging.getLogger('vllm.engine').warning('banner')\n"
        "structlog.get_logger().debug('detail')\n"
        "structlog.get_logger().info(os.environ['VLLM_CONFIGURE_LOGGING'])\n"
    )

    assert [line["event"] for line in lines] == ["0"]


def test_an_error_of_ours_ends_a_process_with_its_text_alone():
    lines, code = lines_of(
        "from configs.errors import SettingsError\n"
        "from configs.logging import configure_logging\n"
        "configure_logging('broker')\n"
        "raise SettingsError('run.steps must be >= 1, got 0')\n"
    )

    assert code == 1
    assert lines[0]["event"] == "run.steps must be >= 1, got 0"
    assert "exception" not in lines[0]


def test_an_unexpected_error_is_one_line_with_its_traceback():
    lines, code = lines_of(
        "from configs.logging import configure_logging\nconfigure_logging('broker')\n1 / 0\n"
    )

    assert code == 1
    assert len(lines) == 1
    assert "ZeroDivisionError" in lines[0]["exception"]


def test_a_terminal_shows_a_traceback_without_the_values_of_variables():
    program = (
        "import sys; sys.stderr.isatty = lambda: True\n"
        "from configs.logging import configure_logging\n"
        "configure_logging('broker')\n"
        "def connect(password): raise RuntimeError('refused')\n"
        "connect('hunter' + '2')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert "in connect" in done.stderr
    assert "RuntimeError: refused" in done.stderr
    assert "hunter2" not in done.stderr


def test_what_came_from_elsewhere_does_not_steer_a_terminal():
    program = (
        "import sys; sys.stderr.isatty = lambda: True\n"
        "import structlog; from configs.logging import configure_logging\n"
        "configure_logging('broker')\n"
        "log = structlog.get_logger()\n"
        "log.info('boom \\x1b]0;owned\\x07', actor='right\\u202eleft')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert r"boom \x1b]0;owned\x07" in done.stderr
    assert r"right\u202eleft" in done.stderr
    assert "\x1b]" not in done.stderr
