"""A run under random faults and a lying actor for as long as asked: what breaks, and what grows."""
