"""Publication of weights, beside training.

background_publish  Publishing weights in the background, while the next batch is claimed and packed
broadcast           Broadcast of one version to the members of a weight group, with a deadline for
                    everything
broker_list         Addresses of the run's brokers on their way to actors: from the store to the
                    publisher's folder
epochs              Weight epochs: membership of process groups, and the deadlines of each phase
group               The sending end of a weight group: a torch process group of its own, rank 0
log                 `weights.jsonl` in the folder of a run: each version that was sealed, and its
                    delivery
nccl_strikes        Strikes of members of NCCL groups: which of them a broken broadcast is charged
                    to
paths/              Paths of a version to its actors: from whom each of them pulls it
pauses              Time for which generation has paused for swaps, as actors say with each JOIN
publish             Publishing weights: from the model on all ranks to sealed bytes that actors can
                    fetch
publisher_process   The weight publisher process: sidecar of learner rank 0
server              The publisher's server: messages of actors in, announcements and slices of
                    weights out
sidecar             The publisher process as rank 0 sees it: start, wake, watch, restart
slots               Slots: files in shared memory by which the learner hands sealed weights to its
                    publisher
updates/            Updates to versions: what has changed since the one before, and the form in
                    which it travels
versions_on_offer   Versions that can be pulled, whole or as updates: the current one, and one still
                    being pulled
wire/               The wire form of a model: order and layout of its tensors, and their bytes
"""
