"""Views of a run: progress, tables.

display    The display of a run: the live view on a terminal, plain lines elsewhere
live_view  The live view of a run: a snapshot as lines for a terminal of any width and height
progress   Progress of a run, from the files that the learner writes: pure arithmetic on their lines
result     The summary of a run as a table
snapshot   A run at one moment, as the displays of `nyala up` and `nyala top` get it
"""
