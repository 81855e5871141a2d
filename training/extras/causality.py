"""Proves that a model predicts a token without seeing it, before it is trained.

`transformers` makes a causal LM of models that are none, such as BERT. Each of their positions sees
the token that it predicts: the loss falls to almost nothing, and the model has learned nothing.
"""

from __future__ import annotations

import torch
from torch import nn

from training import model as models
from training import parallel, sharding
from training.config import Config, ConfigError

_TOKENS = 16  # of a row, if the model takes so many; the first quarter is compared
_IDS = 4  # the smallest ids: a shard of the embedding does not tell how many there are
_NOISE = 4.0  # times what two equal rows differ by: nothing, as a rule
_ROUNDINGS = 2.0  # of the largest output: experts may round otherwise with other tokens beside


@torch.no_grad()
def prove_causal(model: nn.Module, config: Config, device: torch.device) -> None:
    """Compares the logits of two rows that begin alike, and then repeat one token or another.

    All ranks call it, with the values that the training starts from.

    Raises:
        ConfigError: the logits of earlier tokens differ.
    """
    row = torch.arange(min(_TOKENS, config.data.seq_len), device=device)[None] % _IDS + 1
    num_earlier = max(1, row.numel() // 4)
    other = row.clone()
    row[0, num_earlier:], other[0, num_earlier:] = 1, 2
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with sharding.computing(config, device):
        first, again, second = (
            parallel.local(models.logits_of(model, ids)) for ids in (row, row, other)
        )
    for module, is_training in modes.items():
        module.training = is_training
    change = (first - second).abs().flatten(2).amax(-1)[0]
    earlier, last = float(change[:num_earlier].max()), float(change[-1])
    noise = _NOISE * float((first - again).abs().max())
    if any("expert" in name for name, _ in model.named_modules()):
        noise += _ROUNDINGS * torch.finfo(first.dtype).eps * float(first.abs().max())
    if earlier > noise:
        raise ConfigError(
            f"model.path: the model is not causal: its outputs for earlier tokens change by"
            f" {earlier:.2g} with later tokens (those of the last by {last:.2g}), so it sees what"
            " it is to predict. Its config may need is_decoder, or it is no model for next tokens"
        )
