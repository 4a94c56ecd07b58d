"""The learner: curriculum, batches, model, losses, loop, checkpoints and the weight publisher.

__main__          `python -m learner`: train, replay kept batches, train on demonstrations, or make
                  initial models
algorithm/        Mathematics of the policy-gradient loss: functions of tensors and settings
assembly          Start of the learner on one rank: join, load, resume, run
checkpointing/    Checkpoints, resumption, recovery of a rewound store, rollback
coordinator       Coordination of ranks: what the loop asks of rank 0 and of followers; the
                  components of a rank
data/             Training data: curriculum, evaluation, and the claim of each batch
initial_model     Small initial models for runs without a pretrained one: made, then trained on
                  demonstrations
launch            Launcher of the learner: number, place and processes of this machine's ranks,
                  without torch
loop              The learner's loop: claim -> train -> guard -> advance -> publish -> record ->
                  checkpoint
model/            The policy: a causal language model, sharded over ranks
phase_names       Names of the phases of a batch, in their order; also for the console, which loads
                  no torch
profiling         Time and memory of a batch's phases, traces of chosen batches, and use of the card
                  (MFU)
rank_zero         Rank 0: claims, task feeder, evaluations, commits and run files
replay            Replay of kept batches on one rank: the learner's loop without a store, actors and
                  publisher
reporting/        Metrics of batches, and the files of a run that record them
several_machines  Ranks on several machines: node 0 starts all of them, and all again when one is
                  lost
sft               Supervised training of a run's model: `python -m learner sft`, which `nyala sft`
                  starts
stopping          Stop in the middle of a batch: the state before it is saved at once, and the
                  learner leaves
supervised        Supervised training: cross entropy of the trained tokens of rows, packed, on all
                  ranks
training/         Training on one batch: preparation, optimizer steps, measurements, guards
weights/          Publication of weights, beside training
"""
