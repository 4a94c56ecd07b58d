"""The verbs of `nyala`: each with its module and its line in the help."""

from __future__ import annotations

VERBS = {
    "new": (
        "console.verbs.new",
        "Write a new folder: settings, a reward, an environment, data, a test.",
    ),
    "up": ("console.verbs.up", "Start a whole run on this machine."),
    "doctor": (
        "console.doctor.command",
        "Check machine, settings or a run, with a remedy for each fault.",
    ),
    "status": ("console.verbs.status", "Show how far a run is."),
    "top": ("console.live.top", "Watch a run."),
    "logs": ("console.live.logs", "Show the logs of a run."),
    "stop": ("console.live.stop", "Stop a run on this machine."),
    "samples": ("console.samples.command", "Show texts that a run has sampled."),
    "report": ("console.report.command", "Write a run, or several, as one HTML file."),
    "compare": (
        "console.compare.command",
        "Compare two runs on the held-out questions that both were asked.",
    ),
    "sweep": ("console.sweep.command", "Make a run for each combination of values, or search."),
    "try": ("console.samples.try_command", "Ask the newest model of a run."),
    "actor": ("console.verbs.roles", "Join a run with one more actor."),
    "join-pack": (
        "console.join_pack.command",
        "Write one file with which another machine joins a run.",
    ),
    "runs": ("console.live.runs", "List the runs of a Redis."),
    "fleet": (
        "console.fleet.command",
        "Write recipes for Kubernetes, Slurm or SkyPilot, and follow the number of actors.",
    ),
    "learner": ("console.verbs.roles", "Run the learner of a run."),
    "broker": ("console.verbs.roles", "Run the broker of a run."),
    "keys": ("console.verbs.keys", "Make the keys of a cluster, and choose who may connect."),
    "buffer": ("console.verbs.buffer", "Look into the replay buffer of a run."),
    "weights": ("console.verbs.weights", "Look at the weights that a run has published."),
    "checkpoint": (
        "console.checkpoints.command",
        "List, verify, export and remove the checkpoints of a run.",
    ),
    "push": (
        "console.checkpoints.push",
        "Upload the trained model of a run to the Hugging Face hub.",
    ),
    "settings": (
        "console.verbs.reference",
        "List all settings, with unit, values, default, and when to change them.",
    ),
    "losses": ("console.verbs.reference", "List the mathematics that settings can choose."),
    "metrics": ("console.verbs.reference", "List all figures of a run, with unit and meaning."),
    "messages": (
        "console.verbs.reference",
        "List errors, refusals, alerts and warnings with cause and cure.",
    ),
    "schema": ("console.verbs.reference", "Print the JSON schema of the settings."),
    "data": ("console.verbs.data", "Look at a dataset before a run is trained on it."),
    "env": ("console.verbs.env", "Play a few episodes of an environment."),
    "init-model": ("console.verbs.init_model", "Make the model that a run begins with."),
    "chaos": ("console.chaos.command", "Hurt a live run on purpose and record what happened."),
}
"""Verb -> the module whose `app` has it, or is it, and its line in the help."""
