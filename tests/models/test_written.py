"""Models and training steps as people write them in files of their own."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_losses.device_constants import constants_of
from tests.models.training import check_step

pytestmark = pytest.mark.usefixtures("small_losses")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = batch, length, self.heads, width // self.heads
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class SmallGPT(nn.Module):
    """In the manner of nanoGPT: the head's weight is the embedding's; logits are a result, too."""

    def __init__(self, vocabulary=64, width=32, length=16):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.block = Block(width, 4)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = self.norm(self.block(x))
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def test_small_gpt():
    model = SmallGPT()
    tokens = torch.randint(64, (2, 17))
    check_step(
        model, lambda: model(tokens[:, :-1], tokens[:, 1:].contiguous())[1], ["cross_entropy"]
    )


def perceptron(*widths):
    layers = [
        module
        for inputs, outputs in itertools.pairwise(widths)
        for module in (nn.Linear(inputs, outputs), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


def test_deep_q_learning():
    """The value of the action taken against a bootstrapped target."""
    model, frozen = perceptron(4, 32, 3), perceptron(4, 32, 3)
    states, following = torch.randn(2, 16, 4)
    actions, rewards = torch.randint(3, (16, 1)), torch.randn(16)
    done = torch.rand(16) < 0.2

    def step():
        values = model(states).gather(1, actions)
        with torch.no_grad():
            best = frozen(following).max(1).values
            best[done] = 0.0
        expected = rewards + 0.99 * best
        return F.smooth_l1_loss(values, expected.unsqueeze(1))

    check_step(model, step, ["smooth_l1_loss"])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = perceptron(4, 32, 32)
        self.policy, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, states):
        h = self.trunk(states).tanh()
        return self.policy(h), self.value(h).squeeze(-1)


def test_proximal_policy_optimisation():
    model = ActorCritic()
    states, actions = torch.randn(16, 4), torch.randint(3, (16,))
    advantages, returns, old = torch.randn(3, 16)

    def step():
        logits, values = model(states)
        log_probabilities = F.log_softmax(logits, dim=-1)
        chosen = log_probabilities.gather(1, actions[:, None]).squeeze(1)
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        ratio = (chosen - old.sub(2)).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        value_loss = 0.5 * ((values - returns) ** 2).mean()
        return -surrogate.mean() + 0.5 * value_loss - 0.01 * entropy

    # An op for an entropy as well is for rows of more classes.
    few = constants_of(torch.device("cpu")).statistics_classes > 3
    check_step(model, step, ["cross_entropy" if few else "row_statistics", "mse_loss"])


class VariationalAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = perceptron(20, 32, 8), perceptron(4, 32, 20)

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + (0.5 * log_variance).exp() * noise), mean, log_variance


def test_variational_autoencoder():
    """Reconstruction from logits; the divergence from the prior is no loss of torch's."""
    model = VariationalAutoencoder()
    x, noise = torch.rand(8, 20), torch.randn(8, 4)

    def step():
        logits, mean, log_variance = model(x, noise)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return (reconstruction + divergence) / x.shape[0]

    check_step(model, step, ["binary_cross_entropy_with_logits"])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))


def test_distillation():
    """Hard labels and the teacher's softened probabilities, as image models are distilled."""
    model, teacher = Classifier(), Classifier()
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    temperature, alpha = 3.0, 0.5

    def step():
        logits = model(images)
        with torch.no_grad():
            taught = teacher(images)
        base = F.cross_entropy(logits, labels, label_smoothing=0.1)
        distilled = F.kl_div(
            F.log_softmax(logits / temperature, dim=1),
            F.log_softmax(taught / temperature, dim=1),
            reduction="sum",
            log_target=True,
        )
        distilled = distilled * (temperature * temperature) / logits.numel()
        return base * (1 - alpha) + distilled * alpha

    check_step(model, step, ["cross_entropy", "softmax_kl_div"])


def test_soft_target_cross_entropy():
    """Mixed-up labels, as timm's SoftTargetCrossEntropy takes them."""
    model = Classifier()
    images = torch.randn(8, 3, 16, 16)
    targets = F.one_hot(torch.randint(10, (8,)), 10).float()
    targets = 0.7 * targets + 0.3 * targets.flip(0)

    def step():
        return torch.sum(-targets * F.log_softmax(model(images), dim=-1), dim=-1).mean()

    check_step(model, step, ["cross_entropy"])
