"""Token ratios against ratios of whole episodes, on episodes of three binary tokens.

All eight episodes are enumerated. The ratio of a token corrects what is drawn in its state, not how
often mu comes there; the product over the episode corrects both, at a price in variance.

Shapes: S states (what has been drawn so far), B episodes, T tokens, N = B T.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from configs.settings import AlgorithmSettings
from learner.algorithm.losses import policy_loss
from tests.learner.support.made_tokens import make_prepared

NUM_TOKENS = 3
EPISODES_BT = torch.tensor(list(itertools.product((0, 1), repeat=NUM_TOKENS)))
NUM_EPISODES = len(EPISODES_BT)
STATES_BT = torch.tensor(
    [
        [2**t - 1 + sum(int(bit) << i for i, bit in enumerate(episode[:t])) for t in range(3)]
        for episode in EPISODES_BT
    ]
)
"""Row of each token's state: 0 before the first token, 1 and 2 before the second, 3 to 6."""
RANDOM = torch.Generator().manual_seed(0)
LOGITS_SA = torch.randn(7, 2, generator=RANDOM, dtype=torch.float64)
LOG_MU_SA = (0.7 * torch.randn(7, 2, generator=RANDOM, dtype=torch.float64)).log_softmax(-1)
REWARDS_B = torch.randn(NUM_EPISODES, generator=RANDOM, dtype=torch.float64)

UNBOUNDED = {"surrogate": "reinforce", "aggregation": "sequence_sum", "rho_bar": 1e9}
BY_TOKEN = AlgorithmSettings.model_validate({"correction": "tis", **UNBOUNDED})
BY_EPISODE = AlgorithmSettings.model_validate({"correction": "seq_tis", **UNBOUNDED})


def logprobs(log_policy_SA: Tensor) -> Tensor:
    """Of every token of every episode. Shape [B, T]."""
    return log_policy_SA[STATES_BT, EPISODES_BT]


MU_B = logprobs(LOG_MU_SA).sum(1).exp()
RHOS_BT = (logprobs(LOGITS_SA.log_softmax(-1)) - logprobs(LOG_MU_SA)).exp()


def gradients(settings: AlgorithmSettings) -> Tensor:
    """Ask the loss for the gradient estimate of each episode by itself. Shape [B, S, A]."""
    found: list[Tensor] = []
    for episode in range(NUM_EPISODES):
        logits_SA = LOGITS_SA.clone().requires_grad_()
        log_pi_T = logprobs(logits_SA.log_softmax(-1))[episode]
        prepared = make_prepared(
            logprobs(LOG_MU_SA)[episode],
            REWARDS_B[episode].expand(NUM_TOKENS),
            torch.ones(NUM_TOKENS, dtype=torch.float64),
            lengths=[NUM_TOKENS],
        )
        loss = policy_loss(log_pi_T, torch.zeros(NUM_TOKENS), prepared, settings).loss
        found += torch.autograd.grad(-loss, logits_SA)
    return torch.stack(found)


def scores() -> Tensor:
    """The gradient of every token's log pi by the logits. Shape [B, T, S, A]."""
    pi_SA = LOGITS_SA.softmax(-1)
    scores_BTSA = torch.zeros(NUM_EPISODES, NUM_TOKENS, *pi_SA.shape, dtype=torch.float64)
    for episode, t in itertools.product(range(NUM_EPISODES), range(NUM_TOKENS)):
        state, action = STATES_BT[episode, t], EPISODES_BT[episode, t]
        scores_BTSA[episode, t, state] = -pi_SA[state]
        scores_BTSA[episode, t, state, action] += 1
    return scores_BTSA


def true_gradient() -> Tensor:
    """Differentiate E_pi[R] itself. Shape [S, A]."""
    logits_SA = LOGITS_SA.clone().requires_grad_()
    value = logprobs(logits_SA.log_softmax(-1)).sum(1).exp() @ REWARDS_B
    (gradient_SA,) = torch.autograd.grad(value, logits_SA)
    return gradient_SA


def test_the_ratio_of_an_episode_has_no_bias():
    mean_SA = torch.einsum("b,bsa->sa", MU_B, gradients(BY_EPISODE))

    assert torch.allclose(mean_SA, true_gradient(), atol=1e-12, rtol=0)


def test_the_bias_of_token_ratios_is_what_the_other_tokens_would_have_corrected():
    mean_SA = torch.einsum("b,bsa->sa", MU_B, gradients(BY_TOKEN))

    bias_SA = mean_SA - true_gradient()

    missing_BT = RHOS_BT - RHOS_BT.prod(1, keepdim=True)
    expected_SA = torch.einsum("b,b,bt,btsa->sa", MU_B, REWARDS_B, missing_BT, scores())
    assert torch.allclose(bias_SA, expected_SA, atol=1e-12, rtol=0)
    assert bias_SA.abs().max() > 0.01  # it is there to be seen


def test_token_ratios_vary_less_than_the_ratios_of_episodes():
    def variance(settings: AlgorithmSettings) -> float:
        estimates_BSA = gradients(settings)
        mean_SA = torch.einsum("b,bsa->sa", MU_B, estimates_BSA)
        return float(torch.einsum("b,bsa->", MU_B, (estimates_BSA - mean_SA) ** 2))

    assert variance(BY_TOKEN) < variance(BY_EPISODE)


def test_an_episodes_estimate_is_its_formula():
    """Reward times ratio times score, summed over the tokens: what the other tests average."""
    for settings, ratios_BT in (
        (BY_TOKEN, RHOS_BT),
        (BY_EPISODE, RHOS_BT.prod(1, keepdim=True).expand_as(RHOS_BT)),
    ):
        expected_BSA = torch.einsum("b,bt,btsa->bsa", REWARDS_B, ratios_BT, scores())
        assert torch.allclose(gradients(settings), expected_BSA, atol=1e-12, rtol=0)
