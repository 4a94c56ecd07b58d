"""The learner: curriculum, batches, model, losses, loop, checkpoints and the weight publisher.

__main__          `python -m learner`: train, or make the initial model
algorithm/        Mathematics of the policy-gradient loss: functions of tensors and settings
assembly          Start of the learner on one rank: join, load, resume, run
checkpointing/    Checkpoints, resumption, recovery of a rewound store, rollback
coordinator       Coordination of ranks: which batch comes next, and when to checkpoint
data/             Training data: curriculum, evaluation, and the claim of each batch
initial_model     Small initial models, for runs that have no pretrained one: made, then started
                  warm
launch            Start of the learner's ranks as processes of one machine, without torch
loop              The learner's loop: claim -> train -> guard -> advance -> publish -> record ->
                  checkpoint
model/            The policy: a causal language model, sharded over ranks
phase_names       Names of the phases of a batch, in their order; for readers that do not load torch
                  as well
profiling         Time and memory of a batch's phases, traces of chosen batches, and how busy the
                  card was
rank_zero         Rank 0: claims, task feeder, evaluations, commits and run files
reporting/        Metrics of batches, and the files of a run that record them
several_machines  Ranks on several machines: node 0 starts all of them, and all again when one is
                  lost
stopping          A stop in the middle of a batch: the state before it is saved at once, and the
                  learner leaves
training/         Training on one batch: preparation, optimizer steps, measurements, guards
weights/          Publication of weights, beside training
"""
