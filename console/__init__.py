"""The `nyala` command: verbs, supervision of runs, displays.

api           Runs from Python: what `import nyala` offers
command_line  The command line: verbs, arguments that they share, and commands as a person types
              them
display/      Displays of a run on a terminal: its progress, a live view or lines, its summary
doctor/       `nyala doctor`: all checks of a machine, of settings and of a run, one after the other
live/         A run as it happens: its logs, and its end on request
main          `nyala`: its verbs on the command line, and how their errors reach a person
new_project/  Files of a new project, which `nyala new` copies; they work as they are
report/       Finished or running runs on one page: `report.html`, without scripts and without a
              network
run/          Processes of a run: plan, start, watch, restart
samples/      Sampled texts for a person to read: what a run keeps, and answers of its newest model
sweep/        Runs of one settings file with several values: `nyala sweep`
verbs/        Verbs of `nyala`, one module per family
"""

import os
import sys
from pathlib import Path

if os.environ.get("PYTHONPATH"):  # its folders may have packages of our names
    sys.path.insert(0, str(Path(__file__).parents[1]))
