"""Start of the learner's ranks as processes, on one machine or several, without torch."""
