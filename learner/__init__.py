"""The learner: curriculum, batches, model, losses, loop, checkpoints and the weight publisher."""
