"""Training data: curriculum, evaluation, and the claim of each batch.

alarms          Alarms of the learner's data: episodes that nobody makes
batch           Batches: the plan of a sealed claim's episodes
claims          Claims of batches: fill, drop stale and malformed groups, seal, replay
curriculum      Tasks as a pure function of (run seed, id), and the thread that creates them
dealing         Dealing of a batch's sequences to ranks and microbatches
evaluation      Evaluation rounds beside training: held-out questions
group_filter    The filter of groups before training: impossible, stale
ledger          Facts that rank 0 asserts again after Redis lost writes
policy_lag      Policy lag: the number of batches between the policy that sampled a token and
                its training
records         Episodes from the records of tasks: fetch, decode, shape the rewards
retrying_store  A store client that retries while Redis is away
reuse           Groups that are trained again: rate, draw, judge, forget. Rank 0 only
"""
