"""Check of the trackers: their packages and keys are there, and their servers answer."""

from __future__ import annotations

from configs.settings import RunSettings, TrackerSettings
from learner.reporting.trackers.choice import trackers_of


def check_trackers(trackers: TrackerSettings, run: RunSettings) -> str:
    """Each tracker that the settings name can work on this machine.

    Raises:
        SettingsError: One cannot.
    """
    chosen = trackers_of(trackers, run)
    for tracker in chosen.values():
        tracker.check()
    return ", ".join(chosen) or "none"
