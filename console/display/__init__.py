"""Displays of a run on a terminal: its progress, a live view or lines, its summary.

display    The display of a run (live view or plain lines), and lines that are safe on a terminal
live_view  The live view of a run: a snapshot as lines for a terminal of any width and height
progress   Progress of a run, read from the files that it writes: figures, stages, errors, newest
           sample
result     The summary of a finished run as a table, as `nyala up`, `top` and `status` print it
snapshot   A run at one moment, as displays get it, and its figures as texts
"""
