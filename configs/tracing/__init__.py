"""Traces of episodes over the processes of a run; see `docs/traces.md`."""
