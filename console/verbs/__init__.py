"""Verbs of `nyala`, one module per family.

buffer           `nyala buffer`: views of the replay buffer, decisions about dead letters, the end
                 of a pause
cache            `nyala cache`: compiled code in one file, for another machine of the same kind
checkpoints      `nyala checkpoint`: a list of a run's checkpoints, a check, an export, removal of
                 old ones
compare          `nyala compare`: which of two runs answers held-out questions better, and how soon
                 each did
data             `nyala data`: a look at a dataset before a run is trained on it
env              `nyala env`: a few episodes of an environment, played for a person to look at
evaluate         `nyala eval`: a model on the held-out questions of a run, without training
fleet            `nyala fleet`: recipes for schedulers, and jobs by the number of actors that a run
                 wants
join_pack        `nyala join-pack`: one file with all that a machine needs to join a run, written
                 and opened
keys             `nyala keys`: the keys of a run, made, listed, added, revoked and exchanged
messages         All messages of a run with cause and cure, for `nyala messages` and
                 docs/messages.md
new              Beginnings of a run: `nyala new` makes a project's folder, `nyala init-model` a
                 model
push             `nyala push`: the trained model of a run on the Hugging Face hub
reference        References: `nyala settings`, `losses`, `schema`, `metrics`, `messages`
reference_lists  Lists of `nyala losses` and `nyala metrics`, for people, for programs and for the
                 docs
replay           `nyala replay`: kept batches of a run trained again, without Redis and actors, and
                 compared
roles            `nyala actor`, `agents`, `learner`, `broker`: one process of a run, or several
                 actors kept up
session          One session of `nyala up`, from the files of a run to the end of its last process
settings_list    All settings, for `nyala settings` and docs/settings.md
sft              `nyala sft`: supervised training of a run's model on demonstrations
status           `nyala status`: one look at a run, at its folder and, if it answers, its store
tables           Output of the verbs: a title and a table for people, JSON for programs
up               `nyala up`: a whole run on this machine
weights          `nyala weights`: the versions of a run, a check of them, and a copy of one
"""
