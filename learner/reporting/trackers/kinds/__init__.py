"""The trackers that there are, each behind the interface of `tracker.py`."""
