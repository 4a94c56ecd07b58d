"""Mathematics of the policy-gradient loss: functions of tensors and settings.

advantages        Advantages of a batch's episodes, from their rewards
aggregations      Aggregations: the weight of a token in the loss of a batch, computed before the
                  forward pass
catalogue         Catalogue of what the settings of the loss choose by name, for `nyala losses` and
                  the docs
corrections       Corrections: the importance weight of a token, and the tokens left out, from pi/mu
loss_checks       Checks of surrogates, corrections and advantages of the user, on made-up batches
                  in float64
losses            The policy-gradient loss: advantage x correction x surrogate x aggregation, each
                  chosen by name
methods           Published methods as settings: PPO, GRPO, DAPO and others
microbatch        Microbatches: the tensors of one forward pass, and sums over the tokens of their
                  episodes
reference_kl      The KL penalty that keeps pi near a frozen reference policy
surrogates        Surrogates: the objective of a token, and the trust region that stops it
token_advantages  Advantages that differ from token to token, from a critic's values of the states
                  or a teacher
user_losses       Surrogates, corrections and advantages of the user: found, checked, registered
vtrace            V-trace: value targets and advantages for trajectories sampled by another policy
"""
