r"""Policy gradients and preference losses of diffusion language models: noisy views, scores, objectives, a loss.

A diffusion LM has no exact log-probability. Published methods score a completion by a weighted sum of log-probabilities
over noisy views of it,

    S_b = sum_k sum_i w_kbi log p(y_bi | view k),

and differ in the views and in the function of S.
"""

from dllm_kernels.policy.loss import PolicyLoss, PolicyLossOutput
from dllm_kernels.policy.objective import PolicyObjective, nll_weights
from dllm_kernels.policy.views import PolicyViews, eubo, policy_views

__all__ = ["PolicyLoss", "PolicyLossOutput", "PolicyObjective", "PolicyViews", "eubo", "nll_weights", "policy_views"]
