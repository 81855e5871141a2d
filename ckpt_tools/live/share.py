"""Of what several ranks need, one reads and sends: for stores that are slower than the network between the ranks.

Every rank knows what all of them need, so all come to the same division without asking again. Each byte that is needed somewhere is
read once, and every rank reads and sends about as much. Imports torch. May import levels 0 to 2, shards and group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ckpt_tools.box import Box
from ckpt_tools.live.group import Group
from ckpt_tools.live.shards import Shard, as_bytes

Key = tuple[str, str, Box]


class Move(NamedTuple):
    """A piece that one rank has read and others need; `number` is the same on all of them."""

    number: int
    shard: Shard
    reader: int
    others: tuple[int, ...]


def divide(group: Group, shards: Sequence[Shard]) -> tuple[list[Shard], list[Move]]:
    """Decides who reads what; called by all ranks.

    Args:
        group: all ranks.
        shards: what this rank needs.

    Returns:
        What this rank reads, and the pieces that it is to send or to receive after that.
    """
    mine: dict[Key, Shard] = {(s.fqn, s.dtype.name, s.box): s for s in shards if s.nbytes}
    sizes: dict[Key, int] = {}
    holders: dict[Key, list[int]] = {}
    for rank, needs in enumerate(group.all_gather([(key, shard.nbytes) for key, shard in mine.items()], "divide the reading")):
        for key, nbytes in needs:
            sizes[key] = nbytes
            holders.setdefault(key, []).append(rank)
    load = [0] * group.size
    reads: list[Shard] = []
    moves: list[Move] = []
    for number, key in enumerate(sorted(holders, key=lambda k: (-sizes[k], k))):
        ranks = holders[key]
        reader = min(ranks, key=lambda rank: (load[rank], rank))
        load[reader] += sizes[key]
        if reader == group.rank:
            reads.append(mine[key])
        if group.rank in ranks and len(ranks) > 1:
            moves.append(Move(number, mine[key], reader, tuple(r for r in ranks if r != reader)))
    return reads, moves


def send_around(group: Group, moves: Sequence[Move]) -> int:
    """Sends what this rank has read to those that need it, and receives the rest; returns the bytes received."""
    sends: list[tuple[int, int, torch.Tensor]] = []
    receives: list[tuple[int, int, torch.Tensor]] = []
    bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, shard, reader, others in moves:
        view = as_bytes(shard.tensor)
        host = torch.frombuffer(view, dtype=torch.uint8) if view is not None else _on_host(shard.tensor)
        if reader == group.rank:
            sends += [(rank, number, host) for rank in others]
        else:
            receives.append((reader, number, host))
            if view is None:
                bounced.append((shard.tensor, host))
    group.exchange(sends, receives, "send what was read")
    for tensor, host in bounced:
        tensor.copy_(host.view(tensor.dtype).view(tensor.shape))
    return sum(host.numel() for _, _, host in receives)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
