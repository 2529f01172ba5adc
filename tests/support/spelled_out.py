"""Attention as hand-written models spell it out, and what looks like it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    """As hand-written models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.0)
        self.scale, self.temperature = 0.25, nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("bias", torch.randn(4, 6, 6))

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)]

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ k.mT

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = self.drop(F.softmax(att, dim=-1))
        return self.out((att @ v).transpose(1, 2).flatten(2))


class OtherScale(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        p = (torch.matmul(q, k.mT) / 3 * self.scale + self.bias).where(self.mask, float("-inf")).softmax(-1)
        return self.out(p.matmul(v).transpose(1, 2).flatten(2))


class ManySteps(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        s = torch.bmm(q.reshape(-1, 6, 4), k.reshape(-1, 6, 4).mT) * 2
        s = self.bias + s.view(-1, 4, 6, 6)
        s = torch.where(self.mask, s.float() / 2.0, torch.tensor(torch.finfo(s.dtype).min))
        p = torch.softmax(s, -1, dtype=torch.float32).to(v.dtype).view(-1, 6, 6)
        return self.out(torch.bmm(p, v.reshape(-1, 6, 4)).view(-1, 4, 6, 4).transpose(1, 2).flatten(2))


class LearnedBias(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        p = F.softmax(q @ k.mT + self.temperature * self.bias, -1)
        return self.out((p @ v).transpose(1, 2).flatten(2))


class OtherAxis(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out((F.softmax(q @ k.mT, -2) @ v).transpose(1, 2).flatten(2))


class SoftMask(Plain):
    """Masked scores stay in the softmax."""

    def forward(self, x):
        q, k, v = self.heads(x)
        p = F.softmax((q @ k.mT).masked_fill(~self.mask, 0.0), -1)
        return self.out((p @ v).transpose(1, 2).flatten(2))


class TwoSoftmaxes(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out((F.softmax(F.softmax(q @ k.mT, -1), -1) @ v).transpose(1, 2).flatten(2))


class ScaledWeights(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out((F.softmax(q @ k.mT, -1) * 2 @ v).transpose(1, 2).flatten(2))


class MaskedWeights(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        p = F.softmax(q @ k.mT, -1).masked_fill(~self.mask, 0.0)
        return self.out((p @ v).transpose(1, 2).flatten(2))


class Capped(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out((F.softmax(torch.tanh(q @ k.mT), -1) @ v).transpose(1, 2).flatten(2))


class Temperature(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out((F.softmax(q @ k.mT * self.temperature, -1) @ v).transpose(1, 2).flatten(2))


class InPlace(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        s = q @ k.mT
        first = s
        s += self.bias
        s[..., 0] = 0
        return self.out((F.softmax(first, -1) @ v).transpose(1, 2).flatten(2))


class Detached(Plain):
    """The scores have no gradient."""

    def forward(self, x):
        q, k, v = self.heads(x)
        with torch.no_grad():
            s = q @ k.mT
        return self.out((F.softmax(s, -1) @ v).transpose(1, 2).flatten(2))


class AsksForTheType(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        s = q @ k.mT
        s = s * 2 if isinstance(s, torch.Tensor) else s
        return self.out((F.softmax(s, -1) @ v).transpose(1, 2).flatten(2))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Any) -> Any:
        return scores.softmax(-1) * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class HidesItsGraph(Plain):
    def softmax(self, scores):
        return _Softmax.apply(scores)

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out((self.softmax(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class OverwritesScores(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        s = q @ k.mT
        p = F.softmax(s, -1)
        s.zero_()
        return self.out((p @ v).transpose(1, 2).flatten(2))


class Overwrites(Plain):
    def forward(self, x):
        q, k, v = self.heads(x)
        s = q @ k.mT
        q.mul_(2)
        return self.out((F.softmax(s, -1) @ v).transpose(1, 2).flatten(2))
