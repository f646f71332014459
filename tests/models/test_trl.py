"""The losses of TRL, on small language models of transformers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import compile_losses
from tests.accuracy import assert_accurate
from tests.models.test_transformers import build
from tests.models.training import check_step

pytestmark = pytest.mark.usefixtures("kernels_for_small_losses")

pytest.importorskip("trl", reason="pip install .[models]")


def teacher_logits(batch):
    model, _ = build("Llama")
    with torch.no_grad():
        return model(batch["input_ids"]).logits


def distillation(trainer, beta, masked, **options):
    """A student, and a step with the loss of one of TRL's trainers."""
    model, batch = build("Llama")
    teacher = teacher_logits(batch)
    labels = batch["labels"] if masked else None

    def step():
        logits = model(batch["input_ids"]).logits
        return trainer.generalized_jsd_loss(
            logits, teacher, labels=labels, beta=beta, temperature=2.0, **options
        )

    return model, step


#: Betas and whether tokens are masked: all betas without, an end and the middle with.
GENERALIZED = [(0.0, False), (0.1, False), (0.5, False), (1.0, False), (0.0, True), (0.1, True)]
GENERALIZED += [pytest.param(beta, True, marks=pytest.mark.slow) for beta in (0.5, 1.0)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("beta", "masked"), GENERALIZED)
def test_generalized_knowledge_distillation(beta, masked):
    """GKD's Jensen-Shannon divergence, forward and reverse divergence at its ends."""
    from trl.experimental.gkd import GKDTrainer

    model, step = distillation(GKDTrainer, beta, masked)
    if not masked:
        expected = ["softmax_js_div" if 0 < beta < 1 else "softmax_kl_div"]
    else:  # a boolean index ends Dynamo's graph: single elements leave it
        expected = ["kl_div", "kl_div"] if 0 < beta < 1 else ["kl_div"]
    check_step(model, step, expected)


#: Every beta, and every reduction with a beta between the ends.
IN_ONE_GRAPH = [(0.0, "batchmean"), (0.1, "batchmean"), (1.0, "batchmean"), (0.1, "sum")]
IN_ONE_GRAPH += [(0.1, "mean")]
IN_ONE_GRAPH += [
    pytest.param(beta, reduction, marks=pytest.mark.slow)
    for beta in (0.0, 1.0)
    for reduction in ("sum", "mean")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("beta", "reduction"), IN_ONE_GRAPH)
def test_distillation_of_masked_tokens_in_one_graph(beta, reduction):
    from trl.experimental.gkd import GKDTrainer

    model, step = distillation(GKDTrainer, beta, True, reduction=reduction)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = check_step(model, step, ["softmax_js_div" if 0 < beta < 1 else "softmax_kl_div"])
    assert report.graph_breaks == []


def test_distillation_by_the_number_of_tokens():
    from trl.experimental.gkd import GKDTrainer

    count = torch.tensor(7)
    model, step = distillation(GKDTrainer, 0.3, False, num_items_in_batch=count)
    check_step(model, step, ["softmax_js_div"], explained=True)


@pytest.mark.parametrize("name", ["gold.GOLDTrainer", "iw_opd.IWOPDTrainer"])
def test_other_distillation(name):
    module, _, trainer = name.partition(".")
    module = pytest.importorskip(f"trl.experimental.{module}", reason="pip install .[models]")
    model, step = distillation(getattr(module, trainer), 0.1, False)
    check_step(model, step, ["softmax_js_div"])


#: Every pair of beta, of whether the teacher's logits are given and of whether tokens are masked.
WITHOUT_LOGITS = [
    pytest.param(*options, marks=() if sum(map(bool, options)) % 2 else pytest.mark.slow)
    for options in itertools.product((0.0, 0.1, 1.0), (False, True), (False, True))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("beta", "given", "masked"), WITHOUT_LOGITS)
def test_distillation_without_logits(beta, given, masked, chunks):
    """With the head, and the teacher's where it is called in the step, as GKD's trainer does."""
    from trl.experimental.gkd import GKDTrainer

    chunks(4)
    model, batch = build("Llama")
    other, _ = build("Llama")  # of which nothing is frozen
    known = teacher_logits(batch)

    def step():
        student = model(batch["input_ids"]).logits
        teacher = known
        if not given:
            with torch.no_grad():
                teacher = other.eval()(batch["input_ids"]).logits
        return GKDTrainer.generalized_jsd_loss(
            student, teacher, labels=labels, beta=beta, temperature=2.0
        )

    labels = batch["labels"] if masked else None
    op = "linear_softmax_js_div" if 0 < beta < 1 else "linear_softmax_kl_div"
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = check_step(model, step, [op])
        (site,) = compile_losses.explain(step).losses
    assert site.plan[0].startswith(
        "gradient in forward by row" if masked else "gradient in forward"
    )
    layers = "a linear layer" if given else "the linear layers of student and teacher"
    assert report.losses[0].reason.startswith(f"absorbed {layers}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", [False, True])
def test_distillation_from_a_server(tail, beta, chunks, no_code):
    """A server has sent the likeliest classes of each token; an entropy is logged."""
    module = pytest.importorskip(
        "trl.experimental.async_distillation.async_distillation_trainer",
        reason="pip install .[models]",
    )
    rows, hidden, classes, count = 40, 16, 67, 6
    generator = torch.Generator().manual_seed(0)
    h, w, logits = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((rows, hidden), (classes, hidden), (rows, classes))
    )
    teacher, index = logits.log_softmax(-1).float().topk(count, -1)
    valid = torch.rand(rows, count, generator=generator) < 0.8
    valid[:, 0] = True
    index = torch.where(valid, index, -1)

    def step(h, w):
        options = (None, 1.0, None, index, teacher, valid, beta, 1.5, tail, None, 0)
        loss, _, entropy, *_ = module._jsd_loss_chunk(h, w, *options)
        return loss / rows, entropy

    results = []
    compiled = torch.compile(step, backend="compile_losses", fullgraph=True)
    for function, dtype in ((compiled, torch.float32), (step, torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in (h, w)]
        loss, entropy = function(*leaves)
        results.append((loss.detach(), entropy, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    sites = compile_losses.explain(step, *(t.float().requires_grad_() for t in (h, w))).losses
    (site,) = [site for site in sites if site.op == "linear_row_statistics"]
    assert site.status == "rewritten"
    assert site.plan[0] == "gradient in forward by row"


def test_distillation_in_bfloat16():
    """The mixture's weights are those that were written, not their roundings."""
    from trl.experimental.gkd import GKDTrainer

    def loss(student, teacher):
        return GKDTrainer.generalized_jsd_loss(student, teacher, beta=0.1)

    x, t = (torch.randn(4, 6, 50) * 2 for _ in range(2))
    results = []
    compiled = torch.compile(loss, backend="compile_losses", options={"inner_backend": "eager"})
    for function, dtype in (
        (compiled, torch.bfloat16),
        (loss, torch.bfloat16),
        (loss, torch.float64),
    ):
        leaf = x.bfloat16().to(dtype).requires_grad_()
        value = function(leaf, t.bfloat16().to(dtype))
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    (ours, our_gradient), (eager, eager_gradient), (exact, exact_gradient) = results
    assert_accurate(ours, eager, exact)
    assert_accurate(our_gradient, eager_gradient, exact_gradient, "gradient")


def test_supervised_fine_tuning():
    """SFTTrainer's loss is the model's own, with the number of targets over all micro-batches."""
    model, batch = build("Qwen3")
    count = (batch["labels"] != -100).sum()
    check_step(
        model,
        lambda: model(**batch, num_items_in_batch=count).loss,
        ["cross_entropy"],
        explained=True,
    )


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

    if dtype == torch.float32:
        check_step(model, step, ["cross_entropy"])
    found = [(site.op, site.status) for site in compile_losses.explain(step).losses]
    assert found == [("cross_entropy", "rewritten")]


def test_log_probabilities_without_logits(chunks):
    """The same with the head: the gradients by row are made in the forward."""
    from trl.trainer.utils import selective_log_softmax

    chunks(4)
    model, batch = build("Llama")
    tokens = batch["input_ids"][:, 1:]
    advantages, old = torch.randn(tokens.shape[0], 1), torch.randn(tokens.shape) - 5

    def step():
        logits = model(batch["input_ids"]).logits[:, :-1] / 0.9
        ratio = (selective_log_softmax(logits, tokens) - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * advantages, clipped * advantages).mean()

    check_step(model, step, ["linear_cross_entropy"])
    (site,) = compile_losses.explain(step).losses
    assert site.plan[0] == "gradient in forward by row"


@pytest.mark.parametrize("bonus", [0.0, 0.01])
def test_entropies_beside_log_probabilities(bonus, chunks):
    """As GRPO logs them, and with a bonus for them: the logits are computed once, and not held."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    chunks(4)
    model, batch = build("Llama")
    tokens = batch["input_ids"][:, 1:]
    advantages, old = torch.randn(tokens.shape[0], 1), torch.randn(tokens.shape) - 5
    logged = []

    def policy_loss():
        logits = model(batch["input_ids"]).logits[:, :-1] / 0.9
        ratio = (selective_log_softmax(logits, tokens) - old).exp()
        with torch.set_grad_enabled(bonus > 0):
            entropy = entropy_from_logits(logits, chunk_size=6).mean()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        return loss - bonus * entropy, entropy.detach()

    def step():
        loss, entropy = policy_loss()
        logged.append(entropy)
        return loss

    def compiled():
        loss, entropy = whole()
        logged.append(entropy)
        return loss

    whole = torch.compile(policy_loss, backend="compile_losses")
    check_step(model, step, ["linear_row_statistics"], compiled=compiled)
    torch.testing.assert_close(logged[0], logged[1])
    (site,) = compile_losses.explain(policy_loss).losses
    assert site.plan[0] == "gradient in forward by row"


def test_token_accuracy_beside_the_loss(chunks, no_code):
    """What SFTTrainer logs of each step, in the step, with the model's own loss."""
    chunks(4)
    model, batch = build("Qwen3")

    def step():
        outputs = model(**batch)
        with torch.no_grad():
            guesses, labels = outputs.logits[..., :-1, :].argmax(-1), batch["labels"][..., 1:]
            accuracy = (guesses == labels).sum() / (labels != -100).sum()
        return outputs.loss, accuracy

    loss, accuracy = step()
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="compile_losses")
    torch.testing.assert_close(compiled(), (loss, accuracy))
    assert [site.op for site in compile_losses.explain(step).losses] == ["linear_row_statistics"]


def test_preference_loss():
    """DPO's: there is no fused op for it, and nothing claims that there is."""
    model, batch = build("Llama")

    def step():
        logits = model(batch["input_ids"]).logits
        scores = logits.log_softmax(-1)[..., 3].sum(-1)
        return -F.logsigmoid(scores[0] - scores[1])

    assert compile_losses.explain(step).losses == []
