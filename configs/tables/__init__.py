"""Tables of settings: names, types, defaults, ranges and meanings.

actors        `actors`: the processes that sample; `fleet`: their number, and what they may cost
agents        `agents`: the processes that hold conversations of a run by themselves, started by a
              host
algorithm     `algorithm`, `critic` and `rewards`: how rewards become gradients
all_tables    All tables of settings in one model; `settings.py` adds the rules between tables
base          Base class and field types of the tables of settings
broker        `broker`: the server between actors and buffer, for how long it leases, how often it
              tries
buffer        `buffer` and `replay`: the Redis store, and the groups in it that are trained again
environments  `run.environments`: several environments of one run, and which of them an item is of
learner       `learner`, `parallel`, `guards`: the processes that train, their groups, and bad
              batches
run           `run`: what all roles share, with samples and traces; `console`: display and restarts
sft           `sft`: rows and passes of supervised training, which `nyala sft` does
trackers      `trackers`: experiment trackers that get the run's figures and sampled texts
"""
