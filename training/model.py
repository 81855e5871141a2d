"""A decoder: RMSNorm, rotary attention, SwiGLU. Knows nothing of ranks, data or checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder; `vocab_size` 256 means bytes."""

    dim: int = 192
    num_layers: int = 4
    num_heads: int = 6
    hidden_dim: int = 512
    vocab_size: int = 256
    max_seq_len: int = 256
    rope_theta: float = 10_000.0


MODELS = {
    "tiny": ModelConfig(),
    "small": ModelConfig(dim=512, num_layers=8, num_heads=8, hidden_dim=1376, max_seq_len=1024),
    "medium": ModelConfig(dim=1024, num_layers=24, num_heads=16, hidden_dim=2752, max_seq_len=2048),
}


class RMSNorm(nn.Module):
    """Scales `[..., D]` to unit root mean square, then by a learned weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def rotary_angles(config: ModelConfig, seq_len: int, device: torch.device) -> Tensor:
    """Returns rotation angles `[T, H/2]` for T positions and heads of size H."""
    half = config.dim // config.num_heads // 2
    frequencies = config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    return torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the two halves of each head of `[B, N, T, H]` by position."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over `[B, T, D]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, seq_len, dim = x.shape
        q, k, v = self.wqkv(x).view(batch, seq_len, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq_len, dim))


class FeedForward(nn.Module):
    """SwiGLU over `[B, T, D]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.dim), Attention(config)
        self.ffn_norm, self.feed_forward = RMSNorm(config.dim), FeedForward(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Token ids `[B, T]` to logits `[B, T, V]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def reset_parameters(self) -> None:
        """Draws all weights anew; every module that holds some is visited."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, RMSNorm):
                module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        angles = rotary_angles(self.config, tokens.shape[1], tokens.device)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        return self.output(self.norm(x))
