"""The weight plane between learner and actors: ports, sparse updates, memory.

group_thread   A thread that owns one process group, and listeners of groups closed to strangers
host_pins      Mappings of weights that are registered with the CUDA driver, so that a card copies
               them itself
low_rank       Low-rank changes of matrices, added so that every machine gets the same bits
port           Ports at which actors ask for weights: the publisher's, and that of each actor that
               shares
rice_coding    Adaptive Rice codes: whole numbers in few bits each, where small ones are frequent
seal           Seal of a slot in shared memory, by which readers see writes to it: a seqlock
shared_memory  A private folder in shared memory for files of weights, removed with its owner
sparse         Sparse updates: the changed bits between two versions of weights, in a fraction of
               their bytes
"""
