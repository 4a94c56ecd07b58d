"""Training on one batch: preparation, optimizer steps, measurements, guards.

adamw_8bit   AdamW for matrices whose moments take a byte for each element, in place of four
critic       The critic: values of the states before tokens, their loss and their optimizer
divergence   Figures of a batch's divergence of pi from mu, from sums over tokens and episodes
guards       Guards against divergence: alerts, a lower learning rate, a rollback, the end of the
             run
optimizer    AdamW or Muon with warm-up, decay and gradient clipping; steps that are not finite are
             skipped
preparation  Preparation of a batch: proximal, reference and teacher log-probs, values, token
             advantages
ratio_bins   The few bins in which `metrics.jsonl` counts log-ratios: names and edges; loads without
             torch
step         The optimizer steps of one batch: preparation, then forward, loss and backward, then
             AdamW
"""
