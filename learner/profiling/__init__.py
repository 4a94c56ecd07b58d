"""Time and memory of a batch's phases, traces of chosen batches, and how busy the card was."""
