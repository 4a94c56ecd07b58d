"""Checkpoints, resumption, recovery of a rewound store, rollback.

bucket_copies  Copies of checkpoints in a bucket, or in a folder on another disk: whole, or not
               there
checkpoint     Checkpoints: written whole, verified whole, never changed
export         Export of a checkpoint: a model as `transformers` and vLLM load it, adapters as PEFT
               does
folders        Folders of checkpoints: names, renames, list, the best; and the run's file of
               lineages
inventory      The checkpoints of a run for `nyala checkpoints` and `nyala try`: found, verified,
               removed
learner_state  State of a learner besides tensors, as a checkpoint's `state.json` holds it
manifest       Manifest of a checkpoint: the digests of its files, and a MAC under a key of the run
recovery       Recovery of a store that lost writes: restarted, rewound, failed over, or wiped
resume         Start of a learner from its newest checkpoint, rollback, and trust in another run's
               checkpoint
tensors        Tensors of a checkpoint: names, copies in host memory, files, random number
               generators
verification   Digests of a checkpoint's files: taken while they are written, compared before they
               are loaded
"""
