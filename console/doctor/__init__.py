"""`nyala doctor`: all checks of a machine, of settings and of a run, one after the other.

command   `nyala doctor`: everything that can be wrong with a machine, settings or a run, in one
          list
implied   Checks of all that settings imply: those of `nyala up`, and what it finds out later
live_run  Checks of a run that has begun: code and versions here against its own, roles, refusals,
          keys
machine   Checks of a machine: packages, Python, cards, shared memory, disk, open files, default
          port
"""
