"""Preamble of a script that uses `import nyala`: its runs have stand-ins for the roles."""

import sys

from console import api

MODULE = (sys.executable, "-m", "tests.console.support.up_with_stand_ins")


def use_stand_ins(behaviours="{}"):
    api.UP = (*MODULE, behaviours)
