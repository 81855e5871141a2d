"""Sets the first values of parameters and buffers, equal for every strategy and number of ranks.

Each module has its own random generator. A rank draws the whole module and keeps its shard. Every
strategy and every number of ranks therefore starts with the same values, and no rank holds more
than one whole module. Values are drawn in a copy of the model on the meta device, because FSDP
changes the modules of the model itself.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from training.model import Use, initializer, tied


class Init:
    """An initializer of modules. The values depend only on the seed and the module's name.

    Args:
        model: on the meta device, before anything wraps its modules.
        device: the device that draws numbers. A CPU and a GPU draw different numbers, so it does
            not depend on where parameters are kept.
        draw: set the values of parameters; buffers get their values in any case.
    """

    def __init__(
        self, model: nn.Module, seed: int, device: torch.device, draw: bool = True
    ) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.blank = dict(copy.deepcopy(model).named_modules())
        self.fill, self.seed, self.draw = initializer(model), seed, draw
        self.writes = dict(_writes(self.blank, self.fill)) if draw else {}
        self.writer = {
            target: above for above, targets in self.writes.items() for target in targets
        }
        self.device = device if draw else torch.device("meta")
        # for each use of a tied weight: the use whose module sets its values
        self.first: dict[tuple[int, str], Use] = {}
        for uses in tied(model):
            self.first |= {(id(use.module), use.name): uses[0] for use in uses}
        # only tied weights: FSDP1 could never free anything else held here
        self.made: dict[Use, nn.Parameter] = {}

    def all(self, model: nn.Module) -> None:
        """Fills a model that has memory: plain tensors or shards."""
        for module in model.modules():
            if id(module) in self.names and (module._buffers or (self.draw and module._parameters)):
                self._fill(module)

    def materialize(self, module: nn.Module, device: torch.device) -> None:
        """Gives one module of a meta model memory and values; FSDP1 calls it as `param_init_fn`."""
        for name, meta in module._parameters.items():
            if meta is not None and meta.is_meta:
                use = self.first.get((id(module), name))
                made = self.made.get(use) if use else None
                if made is None:
                    made = nn.Parameter(
                        torch.empty_like(meta, device=device), requires_grad=meta.requires_grad
                    )
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
        name = self.names[id(module)]
        drawn = self._draw(
            name, {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        )
        for key, parameter in module._parameters.items() if self.draw else ():
            use = self.first.get((id(module), key))
            if parameter is not None and (
                use is None or (use.module is module and use.name == key)
            ):
                above = self.writer.get((name, key))
                _keep_shard(
                    parameter, (self._draw(above, {}) if above is not None else drawn)[name, key]
                )

    def _draw(self, name: str, buffers: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
        """Calls the initializer of one module.

        Returns the parameters that it writes, whole, by module and name.

        Args:
            buffers: the module's own buffers, which are filled in place.
        """
        module = self.blank[name]
        targets = [
            (name, key) for key, p in module._parameters.items() if p is not None
        ] + self.writes.get(name, [])
        held = {target: self.blank[target[0]]._parameters[target[1]] for target in targets}
        whole = {
            at: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=self.device))
            for at, p in held.items()
            if p is not None
        }
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        unset = dict(module._buffers)
        self._put(whole)
        module._buffers.update(buffers)
        try:
            self.fill(module)
        finally:
            self._put(held)
            module._buffers.update(unset)
        return dict(whole)

    def _put(self, parameters: Mapping[tuple[str, str], nn.Parameter | None]) -> None:
        for (name, key), parameter in parameters.items():
            self.blank[name]._parameters[key] = parameter


@torch.no_grad()
def _writes(
    modules: dict[str, nn.Module], fill: Callable[[nn.Module], None]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields modules whose initializer writes parameters of inner modules, with those parameters.

    Inner modules come first. GPT-2 scales the weights of its residual layers in this way: the
    initializer of the attention writes the weight of its projection.
    """
    for name, module in reversed(modules.items()):
        inner = [
            (path, key, p)
            for path, m in module.named_modules(prefix=name)
            if m is not module
            for key, p in m._parameters.items()
        ]
        before = {id(p): p._version for _, _, p in inner if p is not None}
        if inner:
            fill(module)
        if written := [
            (path, key) for path, key, p in inner if p is not None and p._version != before[id(p)]
        ]:
            yield name, written


def _keep_shard(parameter: Tensor, whole: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(mine.to_local())
