"""Publication of weights, beside training.

background_publish  Publishing weights in the background, while the next batch is claimed and packed
broadcast           Broadcast of one version to the members of a weight group, with a deadline for
                    everything
broker_list         Addresses of the run's brokers on their way to actors: from the store to the
                    publisher's folder
epochs              Weight epochs: membership of process groups, and the deadlines of each phase
gather              The bytes of a model in its wire form: tensors whole, in one fixed order, in the
                    publish dtype
group               The sending end of a weight group, in the publisher: a torch process group of
                    its own, rank 0
layout              Names, order and places of the tensors of a model in its wire form
log                 `weights.jsonl` in the folder of a run: each version that was sealed, and its
                    delivery
memory              Slots: files in shared memory by which the learner hands sealed weights to its
                    publisher
nccl_strikes        Strikes of members of NCCL groups: the members to which a broken broadcast is
                    charged
probe               The probe: tokens that the policy itself samples, its log-probs of them, and
                    their rounding
publish             Publishing weights: from the model on all ranks to sealed bytes that actors can
                    fetch
publisher_process   The weight publisher process: sidecar of learner rank 0
pull                Versions that actors can pull from the publisher, whole or as updates; digests
                    of their slices
server              The publisher's server: messages of actors in, announcements and slices of
                    weights out
sidecar             The publisher process as rank 0 sees it: start, wake, watch, restart
sites               Sites, whose actors fetch each version once over the link to the publisher, by
                    trees of pulls
updates             Sparse updates between versions, and the form in which a version travels to a
                    group
"""
