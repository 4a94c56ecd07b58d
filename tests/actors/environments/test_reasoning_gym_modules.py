"""Import of one dataset of reasoning-gym: as the whole package has it, and little else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NAMES = [
    "spell_backward",
    "acre",
    "leg_counting",
    "knights_knaves",
    "graph_color",
    "list_functions",
]

ALONE = """
import json, random, sys, types
from actors.environments.reasoning_gym import import_dataset

for name in ("cellpylib", "pycosat", "zss"):  # imported by the package, and maybe not installed
    sys.modules[name] = types.ModuleType(name)
whole, *names = sys.argv[1:]
if whole == "whole":
    import reasoning_gym
asked = {}
for name in names:
    dataset = import_dataset(name).create_dataset(name, seed=5, size=50)
    random.seed(0)  # list_functions draws from it
    asked[name] = [str(dataset[number]["question"]) for number in (0, 7)]
loaded = sorted({"dateutil", "sympy"} & set(sys.modules))
import reasoning_gym
reasoning_gym.create_dataset("complex_arithmetic", seed=1, size=1)
print(json.dumps([asked, loaded, len(reasoning_gym.factory.DATASETS)]))
"""


def asked(way: str, *names: str) -> list[object]:
    command = [sys.executable, "-W", "ignore", "-c", ALONE, way, *names]
    ran = subprocess.run(command, capture_output=True, timeout=120, check=True)
    found: list[object] = json.loads(ran.stdout)
    return found


@pytest.mark.slow
def test_a_dataset_alone_asks_what_it_asks_in_the_whole_package():
    questions, loaded, datasets = asked("alone", *NAMES)
    all_questions, all_loaded, all_datasets = asked("whole", *NAMES)

    assert questions == all_questions
    assert (loaded, all_loaded) == ([], ["dateutil", "sympy"])
    assert datasets == all_datasets  # the package is whole for whoever uses it afterwards
