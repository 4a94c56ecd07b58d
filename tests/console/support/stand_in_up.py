"""Preamble of a script that uses `import nyala`: its runs have stand-ins for the roles."""

import sys

from console.api import up_process

MODULE = (sys.executable, "-m", "tests.console.support.up_with_stand_ins")


def use_stand_ins(behaviours="{}"):
    up_process.UP = (*MODULE, behaviours)
