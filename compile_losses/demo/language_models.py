"""The demo's language models: plain PyTorch, as anyone would write it. They know nothing of this
package."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Block(nn.Module):
    """A transformer block: causal self-attention and a feed-forward part, both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.contract(F.gelu(self.expand(self.norm_2(x))))


class GPT(nn.Module):
    """A GPT, of bytes by default. Forward returns the logits or, of targets, the loss."""

    def __init__(
        self,
        width: int = 128,
        layers: int = 2,
        heads: int = 4,
        time: int = 128,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def logits(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.logits(tokens)
        return logits if targets is None else next_token_loss(logits, targets)


class Policy(GPT):
    """A GPT that learns from rewards: PPO's clipped loss with a bonus for entropy (Schulman et al.,
    Proximal Policy Optimization Algorithms, 2017)."""

    clip = 0.2
    bonus = 0.01

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,  # [batch, time], as all that follow but the advantages
        actions: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,  # [batch, 1]
        mask: Tensor,
    ) -> Tensor:
        log_probs = F.log_softmax(self.logits(tokens), dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        chosen = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(chosen - old_log_probs)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * advantages, clipped * advantages) + self.bonus * entropy
        return -(gain * mask).sum() / mask.sum()


class Student(nn.Module):
    """A GPT that learns the distributions of a larger one (Hinton et al., Distilling the Knowledge
    in a Neural Network, 2015)."""

    def __init__(self, student: GPT, teacher: GPT, temperature: float = 2.0) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)
        self.temperature = temperature

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher.logits(tokens).flatten(0, 1)
        logits = self.student.logits(tokens).flatten(0, 1)
        log_probs = F.log_softmax(logits / self.temperature, dim=-1)
        targets = F.softmax(wanted / self.temperature, dim=-1)
        return F.kl_div(log_probs, targets, reduction="batchmean") * self.temperature**2
