"""The models: a built-in decoder, a causal LM of `transformers`, or any module of a factory.

The decoder has RMSNorm, rotary attention and SwiGLU. It and the models of transformers are made on
the meta device. This module knows nothing of ranks, data or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own name for it

from training.config import Config, ConfigError
from training.extras import factory, pretrained


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder; a `vocab_size` of 256 means bytes."""

    dim: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 0  # 0: as many as `num_heads`
    hidden_dim: int = 512
    vocab_size: int = 256
    max_seq_len: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = False

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads


# "1b" and "8b" have the shapes of Llama 3.2 1B and Llama 3.1 8B, at a context of 8,192 tokens
MODELS = {
    "tiny": ModelConfig(),
    "small": ModelConfig(dim=512, num_layers=8, num_heads=8, hidden_dim=1376, max_seq_len=1024),
    "medium": ModelConfig(dim=1024, num_layers=24, num_heads=16, hidden_dim=2752, max_seq_len=2048),
    "1b": ModelConfig(
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=8192,
        vocab_size=128_256,
        max_seq_len=8192,
        rope_theta=5e5,
        norm_eps=1e-5,
        tied_embeddings=True,
    ),
    "8b": ModelConfig(
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14336,
        vocab_size=128_256,
        max_seq_len=8192,
        rope_theta=5e5,
        norm_eps=1e-5,
    ),
}


_HIDDEN = torch.finfo(torch.float32).min  # added to the attention of what a token does not see


class RMSNorm(nn.Module):
    """Scales `[..., D]` to unit root mean square, then by a learned weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_table(config: ModelConfig, seq_len: int, device: torch.device) -> Tensor:
    """Returns cosines and sines `[2, T, H/2]` for T positions and heads of size H."""
    half = config.dim // config.num_heads // 2
    frequencies = config.rope_theta ** (
        -torch.arange(half, device=device, dtype=torch.float32) / half
    )
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the two halves of each head of `[B, N, T, H]` by position."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = table.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention_mask(documents: Tensor) -> Tensor:
    """Returns which tokens each token sees: itself and earlier ones of its document.

    Args:
        documents: `[B, T]`, the number of each token's document in its row.

    Returns:
        `[B, 1, T, T]` bool.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & same.new_ones(same.shape[-2:]).tril()


class Attention(nn.Module):
    """Causal self-attention over `[B, T, D]`, with grouped queries if there are fewer keys.

    The number of heads follows from the weights, because tensor parallelism splits them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.has_groups = config.kv_heads != config.num_heads
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, table), rotate(k, table)
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=self.has_groups
        )
        return self.wo(y.transpose(1, 2).flatten(2))


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
    """One layer: attention and feed-forward, each applied after a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """A decoder from token ids `[B, T]` to logits `[B, T, V]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self._table = torch.empty(0)  # of the last length and device; a buffer would be cast

    def init_weights(self, module: nn.Module) -> None:
        """Sets the first values of one module's own parameters."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        mask = None if documents is None else attention_mask(documents)
        x, table = self.tok_embeddings(tokens), self._rotary_table(tokens)
        for layer in self.layers:
            x = layer(x, table, mask)
        return self.output(self.norm(x))

    def _rotary_table(self, tokens: Tensor) -> Tensor:
        """Returns the table for ids `[B, T]`, computed once per length and device."""
        known, num = self._table, tokens.shape[1]
        if known.ndim != 3 or known.shape[1] != num or known.device != tokens.device:
            with torch.inference_mode(False):
                self._table = rotary_table(self.config, num, tokens.device)
        return self._table


# ---- from a configuration ------------------------------------------------------------------------


def make(config: Config) -> nn.Module:
    """Returns the configured model: on the meta device, or the module of a factory with values.

    Raises:
        ConfigError: sizes contradict each other, a directory has no causal LM, adapters do not fit,
            or a factory makes no module.
    """
    dtype = getattr(torch, config.model.dtype)
    if config.model.factory:
        return factory.call(config).to(dtype)
    with torch.device("meta"):
        path = config.model.path
        model = pretrained.make(path) if path else Decoder(sizes_of(config))
        if config.lora.rank:
            model = pretrained.adapt(model, config.lora)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def sizes_of(config: Config) -> ModelConfig:
    """Returns a built-in decoder's sizes: those of its name, changed by the configuration.

    Raises:
        ConfigError: twice the number of heads does not divide the width.
    """
    names = {f.name for f in fields(ModelConfig)}
    given = {key: size for key, size in config.model.changed().items() if key in names and size}
    sizes = replace(MODELS[config.model.name], **given)
    if sizes.dim % (2 * sizes.num_heads):
        raise ConfigError(
            f"model.dim = {sizes.dim} is not a multiple of 2 x model.num_heads = {sizes.num_heads}"
        )
    if sizes.num_heads % sizes.kv_heads:
        raise ConfigError(
            f"model.num_heads = {sizes.num_heads} is not a multiple of model.num_kv_heads ="
            f" {sizes.num_kv_heads}"
        )
    return sizes


def initializer(model: nn.Module) -> Callable[[str, nn.Module], None]:
    """Returns the function that sets the first values of one module, by its name.

    It sets the module's own parameters, and buffers that are computed.
    """
    if isinstance(model, Decoder):
        return lambda _, module: model.init_weights(module)
    return pretrained.initializer(model)


def vocab_size(model: nn.Module) -> int:
    """Returns the number of different ids that a model accepts."""
    return int(
        model.get_input_embeddings().weight.shape[0]
        if hasattr(model, "get_input_embeddings")
        else model.config.vocab_size
    )


def max_seq_len(model: nn.Module) -> int:
    """Returns the maximum length of a sequence."""
    config = getattr(model, "config", None)
    return int(
        getattr(config, "max_seq_len", 0) or getattr(config, "max_position_embeddings", 1 << 62)
    )


def block_classes(model: nn.Module) -> set[str]:
    """Returns the class names of the model's layers, which FSDP usually shards as units."""
    return (
        {"Block"}
        if isinstance(model, Decoder)
        else set(getattr(model, "_no_split_modules", None) or ())
    )


def logits_of(
    model: nn.Module, tokens: Tensor, documents: Tensor | None = None, packs: bool = False
) -> Tensor:
    """Returns `[B, T, V]` logits for ids `[B, T]`.

    Args:
        documents: `[B, T]`, the number of each token's document in its row; -1 for padding.
        packs: a row may have several documents.
    """
    if documents is None:
        output = model(tokens)
    elif isinstance(getattr(model, "module", model), Decoder):
        output = model(tokens, documents)
    elif not packs:
        output = model(tokens, attention_mask=(documents >= 0).long())
    else:
        sees = attention_mask(documents)
        hidden = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, _HIDDEN)
        output = model(tokens, attention_mask=hidden, position_ids=positions_in(documents))
    return output if isinstance(output, Tensor) else output.logits


def positions_in(documents: Tensor) -> Tensor:
    """Returns `[B, T]` positions that begin again at 0 with each document of a row."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(begins, place, 0).cummax(1).values
