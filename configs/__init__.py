"""Settings, errors, logs, metrics and traces of all roles, with presets. Imports nothing of ours.

architecture     A run's model by its `config.json`: whether it can be trained, how it is run, its
                 longest text
child            Child processes: their end with their parent, and frames on the pipes between both
durable          Files that survive a power loss: written, synced, renamed, and the folder synced
                 after that
error_text       Errors of settings in words: path, allowed values, given value, and the setting
                 probably meant
errors           The tree of errors, one class per failure to act on; exit codes; values quoted in
                 error texts
fleet            The size of a fleet of actors: how many a run wants, and what they cost
forks            Forks of a process that has imported libraries: whether one is safe, and what it
                 lets go of
hashes           Hashes of all that the processes of a run must agree on, compared when an actor
                 joins
json_lines       Files of lines, most of them JSON, that are followed while others write them
loader           Settings from a YAML file and `table.key=value` overrides, and back to a file;
                 their JSON schema
logging          Logs of every process: one JSON object per line on stderr, with role and run
machine          Facts about the machine of a process: GPUs, processor, memory, files, caches,
                 libraries
markdown         Markdown: tables, and texts of other people inside them
metrics          Metrics of a role: descriptions, histograms, addresses that serve them, health, use
                 of GPUs
metrics_server   The HTTP server of one process: `/metrics`, `/livez`, `/readyz`, in threads of its
                 own
metrics_serving  Start of a role's metrics server where its settings ask for it; else nothing is
                 imported
otlp             Client of an OpenTelemetry collector over HTTP; the only module that imports
                 OpenTelemetry
secrets          The URL of Redis, with its password: never in `config.yaml` or on a command line
settings         Settings of a run: one frozen table per role or concern, plus `run` for what roles
                 share
tables/          Tables of settings: names, types, defaults, ranges and meanings
traces           Traces of episodes: ids, spans, which episodes have one, and what each role records
tracing          Tracing in one process where the settings ask for it: the exporting thread; else
                 nothing
user_code        Code of the user, named as `path/to/file.py:name` or `module:name`: found, loaded,
                 explained
user_python      Programs of the user: the command of agents, and a Python for the user's code
                 alone
validation/      Checks of settings against each other, run whenever a `Settings` is made
weight_path      Path that weights take from the learner to actors elsewhere: process groups, or
                 pulls over CURVE
worker           Threads that cannot die silently: a worker keeps the exception that ended it
"""
