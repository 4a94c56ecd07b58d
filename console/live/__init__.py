"""A run as it happens: its logs, and its end on request.

logs  `nyala logs`: what the processes of a run have logged, merged, and followed if asked for
runs  `nyala runs`: the runs of one Redis, as their stores describe them
stop  `nyala stop`: a run on this machine ended as Ctrl-C ends it, from another terminal
top   `nyala top`: the live view of a run, read from its folder and store or asked of its broker
"""
