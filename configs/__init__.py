"""Settings, errors, logging; the presets beside them. Imports nothing of ours.

architecture     The architecture of a model, as its `config.json` has it: can it be trained, and
                 how is it run
child            Child processes: their end with their parent, and frames on the pipes between both
durable          Files that survive a power loss: written, synced, renamed, and the folder synced
                 after that
error_text       Errors of settings in words: path, allowed values, given value, and the setting
                 probably meant
errors           The tree of errors: one class per failure that a person or a caller can act on
fleet            The size of a fleet of actors: how many a run wants, and what they cost
forks            Forks of a process that has imported libraries: whether one is safe, and what it
                 lets go of
hashes           Hashes of all that the processes of a run must agree on, compared when an actor
                 joins
json_lines       Files of lines, most of them JSON, that are followed while others write them
loader           Settings from a YAML file and `table.key=value` overrides, and back to a file
logging          Logs of every process: one JSON object per line on stderr, with role and run
machine          Facts about the machine of a process: cards, arithmetic, memory, files, libraries
markdown         Markdown: tables, and texts of other people inside them
metrics          Metrics of a role: descriptions, addresses that serve them, health, use of cards
metrics_server   The HTTP server of one process: `/metrics`, `/livez`, `/readyz`, in threads of its
                 own
metrics_serving  Serving of a role's metrics where its settings ask for it; else nothing is imported
otlp             A collector of OpenTelemetry over HTTP. The only module that imports its packages
secrets          The URL of Redis, with its password: never in `config.yaml` or on a command line
settings         Settings of a run: one frozen table per role or concern, plus `run` for what roles
                 share
tables/          Tables of settings: names, types, defaults, ranges and meanings
traces           Traces of episodes: spans, the episodes that have one, and what a process has seen
                 of them
tracing          Tracing in one process where the settings ask for it: the exporting thread; else
                 nothing
user_code        Code of the user, named as `path/to/file.py:name` or `module:name`: found, loaded,
                 explained
validation/      Checks between settings of different tables
weight_path      Path that weights take from the learner to actors elsewhere: process groups, or
                 pulls over CURVE
worker           Threads that cannot die silently: a worker keeps the exception that ended it
"""
