"""Mathematics of the policy-gradient loss: functions of tensors and settings.

advantages        Advantages of a batch's episodes, from their rewards
aggregations      Aggregations: the weight of a token in the loss of a batch
catalogue         Catalogue of the choices by name, read from the registries
corrections       Corrections: the importance weight of a token, and the tokens left out
losses            The policy-gradient loss: advantage x correction x surrogate x aggregation
methods           Published methods as settings: PPO, GRPO, DAPO and others
microbatch        Microbatches: the tensors of one forward pass
reference_kl      The KL penalty that keeps pi near a frozen reference policy
surrogates        Surrogates: the objective of a token, and the trust region that stops it
token_advantages  Advantages that differ from token to token
vtrace            V-trace: value targets and advantages for trajectories sampled by another
                  policy
"""
