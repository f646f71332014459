"""The losses of TRL, on small language models of transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.models.test_transformers import build
from tests.models.training import check_step

pytest.importorskip("trl", reason="pip install .[models]")


def teacher_logits(batch):
    model, _ = build("Llama")
    with torch.no_grad():
        return model(batch["input_ids"]).logits


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_generalized_knowledge_distillation(beta, masked):
    """GKD's Jensen-Shannon divergence, forward and reverse divergence at its ends."""
    from trl.experimental.gkd import GKDTrainer

    model, batch = build("Llama")
    teacher = teacher_logits(batch)
    labels = batch["labels"] if masked else None

    def step():
        logits = model(batch["input_ids"]).logits
        return GKDTrainer.generalized_jsd_loss(
            logits, teacher, labels=labels, beta=beta, temperature=2.0
        )

    mixture = 0 < beta < 1
    whole_rows = not mixture and not masked  # a boolean index takes single elements
    expected = ["kl_div", "kl_div"] if mixture else ["softmax_kl_div" if whole_rows else "kl_div"]
    check_step(model, step, expected)


def test_supervised_fine_tuning():
    """SFTTrainer's loss is the model's own, with the number of targets over all micro-batches."""
    model, batch = build("Qwen3")
    count = (batch["labels"] != -100).sum()
    check_step(model, lambda: model(**batch, num_items_in_batch=count).loss, ["cross_entropy"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_of_tokens(dtype):
    """What TRL's policy losses (GRPO, RLOO, DPO) are made of: one sample at a time."""
    from trl.trainer.utils import selective_log_softmax

    model, batch = build("Llama")
    tokens = batch["input_ids"][:, 1:]
    advantages = torch.randn(tokens.shape[0], 1)
    old = torch.randn(tokens.shape) - 5

    def step():
        logits = model(batch["input_ids"]).logits[:, :-1]
        ratio = (selective_log_softmax(logits.to(dtype), tokens) - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * advantages, clipped * advantages).mean()

    report = compile_losses.explain(step)
    if dtype == torch.float32:  # the logsumexp of each sample, stacked: not a spelling of ours
        assert report.sites == []
    else:
        found = [(site.op, site.status) for site in report.sites]
        assert found == [("cross_entropy", "rewritten")] * len(tokens)


def test_preference_loss():
    """DPO's: there is no fused op for it, and nothing claims that there is."""
    model, batch = build("Llama")

    def step():
        logits = model(batch["input_ids"]).logits
        scores = logits.log_softmax(-1)[..., 3].sum(-1)
        return -F.logsigmoid(scores[0] - scores[1])

    assert compile_losses.explain(step).sites == []
