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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Place = tuple[str, str]  # a module's name, and a parameter's name in it
Fill = Callable[[str, nn.Module], None]  # sets the first values of one module, by its name


class Use(NamedTuple):
    """A use of a parameter: a module by name, and the parameter's name in it."""

    path: str
    module: nn.Module
    name: str


def tied(model: nn.Module) -> list[list[Use]]:
    """Returns the uses of each parameter that several modules hold."""
    uses: dict[int, list[Use]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append(Use(path, module, name))
    return [places for places in uses.values() if len(places) > 1]


class FirstValues:
    """Fills the modules of a model that was made on the meta device.

    The values depend on the seed and the modules' names.

    Args:
        model: before anything wraps its modules.
        fill: sets the values of one module: its own parameters, and buffers that are computed.
        seed: of the run.
        device: the device that draws numbers. A CPU and a GPU draw different numbers, so it does
            not depend on where parameters are kept.
        draws: tells by a module's name whether its parameters get values; None: all do. Buffers
            always do.
    """

    def __init__(
        self,
        model: nn.Module,
        fill: Fill,
        seed: int,
        device: torch.device,
        draws: Callable[[str], bool] | None = None,
    ) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seed, self.device, self.draws = seed, device, draws or (lambda _: True)
        self.blank, self.fill = dict(copy.deepcopy(model).named_modules()), fill
        is_wanted = any(self.draws(name) for name, own in self.blank.items() if own._parameters)
        self.writes = dict(_writes(self.blank, self.fill)) if is_wanted else {}
        self.writer = {
            target: above for above, targets in self.writes.items() for target in targets
        }
        # for each use of a tied weight: the use whose module sets its values
        self.first: dict[tuple[int, str], Use] = {}
        for uses in tied(model):
            self.first |= {(id(use.module), use.name): uses[0] for use in uses}
        # only tied weights: FSDP1 could never free anything else held here
        self.made: dict[Use, nn.Parameter] = {}

    def all(self, model: nn.Module) -> None:
        """Fills a model that has memory: plain tensors or shards."""
        for module in model.modules():
            if id(module) in self.names and (module._buffers or module._parameters):
                self._fill(module)

    def materialize(self, module: nn.Module, device: torch.device) -> None:
        """Gives one module of a meta model memory and values; FSDP1 calls it as `param_init_fn`."""
        for name, meta in module._parameters.items():
            if meta is not None and meta.is_meta:
                use = self.first.get((id(module), name))
                made = self.made.get(use) if use else None
                if made is None:
                    empty = torch.empty_like(meta, device=device)
                    made = nn.Parameter(empty, requires_grad=meta.requires_grad)
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
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        keys = [key for key in module._parameters if self._is_set_here(module, name, key)]
        if not buffers and not keys:
            return
        drawn = self._draw(name, buffers)
        for key in keys:
            above = self.writer.get((name, key))
            whole = (self._draw(above, {}) if above is not None else drawn)[name, key]
            keep_shard(module._parameters[key], whole)

    def _is_set_here(self, module: nn.Module, name: str, key: str) -> bool:
        """Tells whether a parameter gets its values from this use of it."""
        use = self.first.get((id(module), key))
        is_first = use is None or (use.module is module and use.name == key)
        return module._parameters[key] is not None and is_first and self.draws(name)

    def _draw(self, name: str, buffers: dict[str, Tensor]) -> dict[Place, nn.Parameter]:
        """Calls the initializer of one module.

        Returns the parameters that it writes, whole.

        Args:
            name: of the module.
            buffers: the module's own buffers, which are filled in place.
        """
        module = self.blank[name]
        own = [(name, key) for key, p in module._parameters.items() if p is not None]
        held = {
            (path, key): self.blank[path]._parameters[key]
            for path, key in own + self.writes.get(name, [])
        }
        device = self.device if self.draws(name) else torch.device("meta")
        whole = {
            place: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device))
            for place, p in held.items()
            if p is not None
        }
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)
        unset = dict(module._buffers)
        self._put(whole)
        module._buffers.update(buffers)
        try:
            self.fill(name, module)
        finally:
            self._put(held)
            module._buffers.update(unset)
        return whole

    def _put(self, parameters: Mapping[Place, nn.Parameter | None]) -> None:
        for (name, key), parameter in parameters.items():
            self.blank[name]._parameters[key] = parameter


@torch.no_grad()
def _writes(modules: dict[str, nn.Module], fill: Fill) -> Iterator[tuple[str, list[Place]]]:
    """Yields modules whose initializer writes parameters of inner modules, with those parameters.

    Inner modules come first. GPT-2 scales the weights of its residual layers in this way: the
    initializer of the attention writes the weight of its projection.
    """
    for name, module in reversed(modules.items()):
        inner = {
            (path, key): p
            for path, m in module.named_modules(prefix=name)
            if m is not module
            for key, p in m._parameters.items()
            if p is not None
        }
        before = {place: p._version for place, p in inner.items()}
        if inner:
            fill(name, module)
        if written := [place for place, p in inner.items() if p._version != before[place]]:
            yield name, written


def keep_shard(parameter: Tensor, whole: Tensor) -> None:
    """Copies this rank's part of a tensor, which every rank has whole, into a parameter."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    whole = whole.to(parameter.device, parameter.dtype)
    mine = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(mine.to_local())
