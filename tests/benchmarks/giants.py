"""Checkpoints of giants without their bytes: the tensors of published models, split for thousands
of ranks, on sparse files.

    python -m tests.benchmarks.giants 70b --ranks 1024 --adamw DIR

`.metadata` is whole and every file has its length, so that inspect, plans and dry runs work for
real; only payloads are holes.

Source of the shapes: the models' config.json on Hugging Face: meta-llama/Llama-3.1-8B, -70B, -405B;
deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ckpt_tools.core.box import Box, whole
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.placements import reshard_boxes, split
from ckpt_tools.formats.dcp import format as dcp
from ckpt_tools.formats.registry import Request, TargetTensor

Shapes = dict[str, tuple[int, ...]]


class Llama(NamedTuple):
    """Sizes of a dense decoder with grouped-query attention."""

    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int = 128_256

    def shapes(self) -> Shapes:
        """Returns the shape of every parameter by name."""
        kv = self.dim // self.heads * self.kv_heads
        layer: Shapes = {
            "self_attn.q_proj.weight": (self.dim, self.dim),
            "self_attn.k_proj.weight": (kv, self.dim),
            "self_attn.v_proj.weight": (kv, self.dim),
            "self_attn.o_proj.weight": (self.dim, self.dim),
            "mlp.gate_proj.weight": (self.hidden, self.dim),
            "mlp.up_proj.weight": (self.hidden, self.dim),
            "mlp.down_proj.weight": (self.dim, self.hidden),
            "input_layernorm.weight": (self.dim,),
            "post_attention_layernorm.weight": (self.dim,),
        }
        ends: Shapes = {"embed_tokens.weight": (self.vocab, self.dim), "norm.weight": (self.dim,)}
        layers = {
            f"layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()
        }
        return {
            **{f"model.{n}": s for n, s in (ends | layers).items()},
            "lm_head.weight": (self.vocab, self.dim),
        }


def experts() -> Shapes:
    """Returns the parameters of DeepSeek-V3: 61 layers, 58 of them with 256 experts, whose matrices
    are one tensor, as torchtitan has them.
    """
    dim, latent, heads = 7168, 512, 128
    attention: Shapes = {
        "self_attn.q_a_proj.weight": (1536, dim),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (heads * 192, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + 64, dim),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * 256, latent),
        "self_attn.o_proj.weight": (dim, heads * 128),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
    }
    found: Shapes = {
        "model.embed_tokens.weight": (129_280, dim),
        "model.norm.weight": (dim,),
        "lm_head.weight": (129_280, dim),
    }
    for layer in range(61):
        part, hidden = ("mlp", 18_432) if layer < 3 else ("mlp.shared_experts", 2048)
        shapes = (
            attention
            | {f"{part}.{n}_proj.weight": (hidden, dim) for n in ("gate", "up")}
            | {f"{part}.down_proj.weight": (dim, hidden)}
        )
        if layer >= 3:
            shapes |= {"mlp.gate.weight": (256, dim), "mlp.experts.w2": (256, dim, 2048)}
            shapes |= {f"mlp.experts.{n}": (256, 2048, dim) for n in ("w1", "w3")}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
    return found


MODELS = {
    "8b": Llama(32, 4096, 14_336, 32, 8).shapes,
    "70b": Llama(80, 8192, 28_672, 64, 8).shapes,
    "405b": Llama(126, 16_384, 53_248, 128, 8).shapes,
    "moe": experts,
}


def boxes(shape: tuple[int, ...], ranks: int) -> tuple[Box | None, ...]:
    """Returns what each rank holds: rows, as FSDP2 cuts; of experts a few (of at most 64 groups of
    ranks), each cut along its rows.
    """
    if len(shape) < 3:
        return tuple(
            reshard_boxes([split(whole(shape), 0, 2, part) for part in range(2)], shape, ranks)
        )
    groups = min(64, ranks)
    share = ranks // groups
    return tuple(
        split(split(whole(shape), 0, groups, r // share), 1, share, r % share)
        for r in range(groups * share)
    )


def targets(
    shapes: Shapes, ranks: int, with_adamw: bool, dtype: str = "bfloat16"
) -> Iterator[TargetTensor]:
    """Yields what every rank saves of parameters, and with AdamW of two moments and a step each."""
    for fqn, shape in shapes.items():
        held = boxes(shape, ranks)
        yield TargetTensor(f"model.{fqn}", BY_NAME[dtype], shape, held)
        for key in ("exp_avg", "exp_avg_sq") if with_adamw else ():
            yield TargetTensor(f"optimizer.state.{fqn}.{key}", BY_NAME["float32"], shape, held)
        if with_adamw:
            yield TargetTensor(
                f"optimizer.state.{fqn}.step",
                BY_NAME["float32"],
                (),
                (whole(()), *[None] * (ranks - 1)),
            )


def build(shapes: Shapes, ranks: int, directory: Path, with_adamw: bool = False) -> int:
    """Writes `.metadata` and files of the right length into a directory; returns the number of
    chunks.
    """
    tensors = list(targets(shapes, ranks, with_adamw))
    layout = dcp.lay_out(Request(tensors, ranks))
    directory.mkdir(parents=True, exist_ok=True)
    for name, nbytes in layout.file_sizes.items():
        with (directory / name).open("wb") as file:
            file.truncate(nbytes)
    assert layout.index is not None
    (directory / layout.index.file).write_bytes(layout.index.data)
    return sum(box is not None for tensor in tensors for box in tensor.boxes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds one, as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--adamw", action="store_true")
    args = parser.parse_args(arguments)
    print(
        f"{build(MODELS[args.model](), args.ranks, args.directory, args.adamw):,} chunks in"
        f" {args.directory}"
    )


if __name__ == "__main__":
    main()
