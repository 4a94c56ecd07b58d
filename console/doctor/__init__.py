"""`nyala doctor`: all checks of a machine, of settings and of a run, one after the other.

command   `nyala doctor`: everything that can be wrong with a machine, settings or a run, in one
          list
implied   Checks of settings or a pack: those of `nyala up`, and what a run would find out later
live_run  Checks of a run that has begun: store, roles, refusals, leases, clocks, code of this
          machine
machine   Checks of a machine: packages, Python, cards, shared memory, disk, open files, default
          port
"""
