"""Advice: rules over the evidence of many batches, each one sentence with cause and remedy.

Pure but for `advisor_thread.py`: rules see numbers and settings, never torch, the store or a file.

advisor         The advisor: which rules hold after each batch
advisor_thread  The thread that advises: gathers evidence, asks the store, judges; training only
                hands it over
answer_rules    Rules about how answers begin and end: prompt template, stop token, length,
                temperature
evidence        Evidence of one batch: all that rules look at, as numbers
flow_rules      Rules about flow: who waits for whom, what is dropped or dies, actors that are slow
gathering       From the episodes of a batch to its evidence: counts, in a few passes over arrays
reward_rules    Rules about rewards: constant, without variance, unread, failing, or different by
                actor
training_rules  Rules about optimization: learning rate, lag, engine against learner, entropy, clip
                bounds
"""
