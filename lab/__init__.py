"""The laboratory: fault injection on live runs of this machine, in no wheel and no image.

actor_fleet  Actors under fault injection: started, replaced, identified by heartbeats, their CPU
             time
command      `nyala chaos`: its options, its progress and its results on the terminal
endurance/   A run under random faults and a lying actor for a given time, to see failures and
             growth
fault_case   One fault on a live run: its victim, its beginning and end, and the recovery
faults/      Faults of the matrix, one module per kind, and the tools that make them
kill_run     The cost of dying actors: whole runs side by side, undisturbed or with killed actors
live_run     A live run under fault injection: `nyala up` in its own process, with actors beside it
matrix       The fault matrix: fault after fault on one live run, a check after each, a table at the
             end
pair_case    Two faults at once, each written for itself, which begin together; pairs drawn from a
             seed
task_trace   Tasks after a fault: their next holder, the tokens kept, the attempts charged
"""
