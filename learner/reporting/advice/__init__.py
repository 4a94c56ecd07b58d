"""Advice: rules over the evidence of many batches, each one sentence with cause and remedy.

Pure but for `advisor_thread.py`: rules see numbers and settings, never torch, the store or a file.

advisor         The advisor: which rules hold after each batch, and which advice that gives
advisor_thread  Rank 0's thread that judges batches for advice, and counts the actors that the run
                wants
answer_rules    Rules about how answers begin and end: prompt template, stop token, length,
                temperature
evidence        Evidence of a batch as numbers, the window of recent evidence that rules see, and a
                rule's type
flow_rules      Rules about flow: who waits for whom, what is dropped or dies, actors that are slow
gathering       Evidence of a batch from its episodes: counts, in a few passes over arrays
reward_rules    Rules about rewards: constant, without variance, unread, failing, or different by
                actor
training_rules  Rules about optimization: learning rate, lag, engine against learner, entropy, clip
                bounds
"""
