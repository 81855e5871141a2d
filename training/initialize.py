"""First values of a model's parameters and buffers, the same for every strategy and number of ranks.

A module is drawn whole, with a generator of its own, and each rank keeps its shard: no two strategies or numbers of ranks start
differently, and no rank holds more than one module whole.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from training.model import Use, initializer, tied


class Init:
    """Gives modules their first values, which depend on the seed and the module's name and on nothing else.

    Args:
        model: on the meta device, before anything is wrapped around its modules.
        device: where numbers are drawn, which differ between a CPU and a GPU: the same wherever parameters are kept.
        draw: give parameters values; buffers get theirs in any case.
    """

    def __init__(self, model: nn.Module, seed: int, device: torch.device, draw: bool = True) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.fill, self.seed, self.draw = initializer(model), seed, draw
        self.device = device if draw else torch.device("meta")
        self.first: dict[tuple[int, str], Use] = {}  # of a tied weight that a module holds: the place that gives it its values
        for uses in tied(model):
            self.first |= {(id(use.module), use.name): uses[0] for use in uses}
        self.made: dict[Use, nn.Parameter] = {}  # tied weights alone: anything else held here would never be freed by FSDP1

    def all(self, model: nn.Module) -> None:
        """Fills a model that has memory: plain tensors or shards."""
        for module in model.modules():
            if id(module) in self.names and (module._buffers or (self.draw and module._parameters)):
                self._fill(module)

    def materialize(self, module: nn.Module, device: torch.device) -> None:
        """Gives one module of a meta model memory and values; what FSDP1 calls `param_init_fn`."""
        for name, meta in module._parameters.items():
            if meta is not None and meta.is_meta:
                use = self.first.get((id(module), name))
                made = self.made.get(use) if use else None
                if made is None:
                    made = nn.Parameter(torch.empty_like(meta, device=device), requires_grad=meta.requires_grad)
                if use:
                    self.made[use] = made
                module._parameters[name] = made
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        if id(module) in self.names:
            self._fill(module)

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        held = {name: p for name, p in module._parameters.items() if p is not None}
        whole = {name: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=self.device)) for name, p in held.items()}
        digest = hashlib.blake2b(f"{self.seed}:{self.names[id(module)]}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        module._parameters.update(whole)
        try:
            self.fill(module)
        finally:
            module._parameters.update(held)
        for name, parameter in held.items() if self.draw else ():
            use = self.first.get((id(module), name))
            if use is None or (use.module is module and use.name == name):
                _keep_shard(parameter, whole[name])


def _keep_shard(parameter: Tensor, whole: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(mine.to_local())
