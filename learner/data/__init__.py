"""Training data: curriculum, evaluation, and the claim of each batch.

alarms          Rank 0's alarm of episodes that nobody makes, and its early commits as Redis memory
                fills up
batch           Batches: the plan of a sealed claim's episodes, and their microbatches on each rank
claims          Claims of batches: filled, stale groups dropped, sealed, and replayed after a crash
curriculum      Training and evaluation tasks as functions of (run seed, id); rank 0's thread that
                creates them
dealing         Dealing of a batch's sequences to ranks and microbatches
evaluation      Evaluation rounds beside training: held-out questions, answered by one policy
                version
grades          Grades of held-out answers: the part of the reward that judges them, and its title
group_filter    Filter of groups before training (impossible, stale, equal rewards); counts of those
                dropped
kept_batches    Kept batches: the records of the last sealed batches, as files in the run's folder
ledger          Facts that rank 0 asserts again after Redis lost writes
policy_lag      Policy lag: the number of batches between the policy that sampled a token and its
                training
records         Episodes from the records of tasks: fetch, decode, shape the rewards; removal of old
                objects
retrying_store  A store client that retries while Redis is away, and has it recovered when it lost
                writes
sampler         Samplers: which prompt a new group asks, by what training has shown of each prompt
reuse           Groups that are trained again: rate, draw, judge, forget. Rank 0 only
teachers        Teachers of on-policy distillation: the tokenizer that they must have, and what only
                they read
"""
