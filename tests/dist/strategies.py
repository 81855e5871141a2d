"""Trains one small model under every option, and compares the losses with a plain loop in one
process. Run by torchrun.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 4 tests/dist/strategies.py DIR [NAME …]

Prints one line a variant, `ok NAME` or `FAILED NAME: why`, on rank 0.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.dist import device
from training import config as configuration
from training import model as models
from training.extras.wrappers import find
from training.batch import Batch
from training.checks import keeps_flat
from training.config import Config
from training.data import Sampler, open_tokens
from training.initialize import FirstValues
from training.job import Job, schedule
from training.job import build as build_job
from training.loss import loss_of
from training.metrics import Meter
from training.prove import prove
from training.train import take_step, train

STEPS = 5
BASE = (
    "run.steps=5", "model.dim=32", "model.num_layers=4", "model.num_heads=4", "model.hidden_dim=64", "data.seq_len=32", "data.batch_size=8",
    "optim.max_grad_norm=0.5", "optim.warmup_steps=2", "metrics.progress=false",
)


IS_CPU = device.NAME == "cpu"
# two units in the last place: on some processors a sum depends on where its numbers lie in memory;
# offloading from a GPU, AdamW runs on another
ROUNDING = 2.5e-7 if IS_CPU else 1e-4


@dataclass(frozen=True)
class Variant:
    """Options, and what the losses are compared with: another variant but for rounding, or the
    plain loop within a relative tolerance.
    """

    options: str
    same_as: str = ""
    tolerance: float = 2e-5
    min_ranks: int = 1


FSDP1 = "fsdp.api=fsdp1"
BF16 = "precision.param=bfloat16 precision.reduce=float32"
VARIANTS = {
    "full": Variant(""),
    "grad_op": Variant("fsdp.strategy=SHARD_GRAD_OP", "full"),
    "no_shard": Variant("fsdp.strategy=NO_SHARD"),
    "hybrid": Variant("fsdp.strategy=HYBRID_SHARD fsdp.shard_size=2", min_ranks=4),
    "hybrid_zero2": Variant("fsdp.strategy=HYBRID_SHARD_ZERO2 fsdp.shard_size=2", "hybrid", min_ranks=4),
    "hybrid_node": Variant("fsdp.strategy=HYBRID_SHARD", "full"),
    "reshard_true": Variant("fsdp.reshard_after_forward=true", "full"),
    "reshard_false": Variant("fsdp.reshard_after_forward=false", "full"),
    "reshard_2": Variant("fsdp.reshard_after_forward=2", "full", min_ranks=4),
    "tensor": Variant("fsdp.tensor_parallel=2", min_ranks=2),
    "tensor_hybrid": Variant("fsdp.tensor_parallel=2 fsdp.strategy=HYBRID_SHARD fsdp.shard_size=1", min_ranks=4),
    "tensor_tied": Variant("fsdp.tensor_parallel=2 model.tied_embeddings=true", "", min_ranks=2),
    "tied": Variant("model.tied_embeddings=true"),
    "tied_no_shard": Variant("model.tied_embeddings=true fsdp.strategy=NO_SHARD"),
    "tied_embeddings_wrapped": Variant("model.tied_embeddings=true fsdp.wrap_embeddings=true", "tied"),
    "wrap_none": Variant("fsdp.wrap=none", "full"),
    "wrap_classes": Variant("fsdp.wrap=classes fsdp.wrap_classes=Attention,FeedForward", "full"),
    "wrap_size": Variant("fsdp.wrap=size fsdp.min_num_params=5000", "full"),
    "wrap_embeddings": Variant("fsdp.wrap_embeddings=true", "full"),
    "activation_checkpointing": Variant("compute.checkpoint_every=1", "full"),
    "every_second_block": Variant("compute.checkpoint_every=2", "full"),
    "offload": Variant("fsdp.cpu_offload=true", "full"),
    "prefetch": Variant("fsdp.forward_prefetch=2 fsdp.backward_prefetch=2", "full"),
    "unshard_ahead": Variant("fsdp.unshard_ahead=true", "full"),
    "accumulation": Variant("data.accumulation=2"),
    "accumulation_grad_op": Variant("data.accumulation=2 fsdp.strategy=SHARD_GRAD_OP", "accumulation"),
    "accumulation_no_shard": Variant("data.accumulation=2 fsdp.strategy=NO_SHARD"),
    "accumulation_fsdp1": Variant(f"data.accumulation=2 {FSDP1}"),
    "reduce_every": Variant("data.accumulation=2 fsdp.reduce_every=true"),
    "reduce_every_no_shard": Variant("data.accumulation=2 fsdp.reduce_every=true fsdp.strategy=NO_SHARD"),
    "reduce_every_fsdp1": Variant(f"data.accumulation=2 fsdp.reduce_every=true {FSDP1}"),
    "fused": Variant("optim.implementation=fused"),
    "foreach": Variant("optim.implementation=foreach"),
    "for_loop": Variant("optim.implementation=for-loop"),
    "decay_all": Variant("optim.decay=all optim.weight_decay=0.3"),
    "decay_strong": Variant("optim.weight_decay=0.3"),
    "decay_fsdp1": Variant(f"{FSDP1} optim.weight_decay=0.3", "decay_strong"),
    "loss_chunk": Variant("compute.loss_chunk=16"),
    "grouped_queries": Variant("model.num_kv_heads=2"),
    "tensor_grouped": Variant("model.num_kv_heads=2 fsdp.tensor_parallel=2", min_ranks=2),
    "tensor_sequence": Variant("fsdp.tensor_parallel=2 fsdp.sequence_parallel=true", min_ranks=2),
    "tensor_loss": Variant("fsdp.tensor_parallel=2 fsdp.loss_parallel=true data.accumulation=2", min_ranks=2),
    "tensor_both": Variant("fsdp.tensor_parallel=2 fsdp.loss_parallel=true fsdp.sequence_parallel=true model.num_kv_heads=2 model.tied_embeddings=true", min_ranks=2),
    "compile": Variant("compute.compile=true compute.compile_backend=aot_eager"),
    "compile_checkpointed": Variant("compute.compile=true compute.compile_backend=aot_eager compute.checkpoint_every=1"),
    "bf16": Variant(BF16, tolerance=5e-3),
    "bf16_reduced": Variant("precision.param=bfloat16 precision.reduce=bfloat16", tolerance=5e-3),
    "bf16_output": Variant(f"{BF16} precision.output=float32", tolerance=5e-3),
    "bf16_norms_float32": Variant(f"{BF16} precision.overrides.*norm=float32", tolerance=5e-3),
    "prefetch_checkpointed_norms": Variant(
        f"{BF16} fsdp.forward_prefetch=1 fsdp.backward_prefetch=2 compute.checkpoint_every=2 precision.overrides.*norm=float32",
        "bf16_norms_float32",
    ),
    "bf16_uncast_inputs": Variant(f"{BF16} precision.cast_forward_inputs=false", tolerance=5e-3),
    "bf16_autocast": Variant("precision.param=bfloat16 precision.reduce=bfloat16 fsdp.strategy=NO_SHARD", tolerance=5e-3),
    "bf16_offload_checkpointed": Variant(f"{BF16} fsdp.cpu_offload=true compute.checkpoint_every=1", "bf16"),
    "bf16_fsdp1": Variant(f"{BF16} {FSDP1} precision.buffer=bfloat16", tolerance=5e-3),
    "fsdp1_full": Variant(FSDP1),
    "fsdp1_grad_op": Variant(f"{FSDP1} fsdp.strategy=SHARD_GRAD_OP", "fsdp1_full"),
    "fsdp1_no_shard": Variant(f"{FSDP1} fsdp.strategy=NO_SHARD"),
    "fsdp1_hybrid": Variant(f"{FSDP1} fsdp.strategy=HYBRID_SHARD fsdp.shard_size=2", min_ranks=4),
    "fsdp1_hybrid_zero2": Variant(f"{FSDP1} fsdp.strategy=HYBRID_SHARD_ZERO2 fsdp.shard_size=2", "fsdp1_hybrid", min_ranks=4),
    # the norm adds up in another order
    "fsdp1_flat": Variant(f"{FSDP1} fsdp1.use_orig_params=false"),
    "fsdp1_prefetch": Variant(f"{FSDP1} fsdp1.forward_prefetch=true fsdp1.backward_prefetch=BACKWARD_POST", "fsdp1_full"),
    "fsdp1_no_prefetch": Variant(f"{FSDP1} fsdp1.backward_prefetch=NO_PREFETCH fsdp1.limit_all_gathers=false", "fsdp1_full"),
    "fsdp1_checkpointed": Variant(f"{FSDP1} compute.checkpoint_every=1", "fsdp1_full"),
    "fsdp1_tied": Variant(f"{FSDP1} model.tied_embeddings=true"),
    "fsdp1_size": Variant(f"{FSDP1} fsdp.wrap=size fsdp.min_num_params=5000"),
}


def config_of(variant: Variant, directory: Path) -> Config:
    return configuration.resolve(None, [*BASE, f"run.dir={directory}", *variant.options.split()])


def plain(config: Config) -> list[float]:
    """The losses of the same model and data in a loop that has never heard of ranks."""
    model = models.make(config).to_empty(device=device.here())
    if config.model.tied_embeddings:
        model.output.weight = model.tok_embeddings.weight
    FirstValues(model, models.initializer(model), config.run.seed, device.here()).all(model)
    data = config.data
    tokens = open_tokens(data.train, data.seq_len, data.batch_size, 256)
    sampler = Sampler(len(tokens), config.run.seed)
    vectors = ("norm", "tok_embeddings", "bias")  # these do not decay
    groups = [[], []] if config.optim.decay != "all" and not (config.fsdp.api == "fsdp1" and not config.fsdp1.use_orig_params) else [[]]
    for name, parameter in model.named_parameters():
        groups[len(groups) - 1 if any(word in name for word in vectors) else 0].append(parameter)
    rates = (config.optim.weight_decay, 0.0)
    optimizer = torch.optim.AdamW([{"params": g, "weight_decay": r} for g, r in zip(groups, rates)], lr=config.optim.lr)
    losses = []
    for step in range(STEPS):
        inputs, targets = (t.to(device.here()) for t in tokens.batch(sampler.next_batch(data.batch_size), slice(None))[:2])
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * schedule(step, config)
        optimizer.step()
        losses.append(loss.item())
    return losses




def build(*options: str) -> Job:
    config = configuration.resolve(None, [*BASE, *options])
    return build_job(prove(config, dist.get_world_size(), dist.get_world_size()), device.here())


def prove_memory() -> None:
    """FULL_SHARD leaves each rank total/N of the parameters; recomputed blocks keep nothing but
    their inputs.
    """
    kept = {}
    for every in (0, 1):
        job = build(f"compute.checkpoint_every={every}")
        local = sum(p.to_local().numel() for p in job.model.parameters())
        assert local * dist.get_world_size() == job.num_parameters, (local, job.num_parameters)
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        inputs, targets = (t.to(job.device) for t in job.plan.rows.batch(list(range(8)), slice(None))[:2])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_of(job, Batch(inputs, targets, None, targets.numel())).backward()
        kept[every] = sum(s.nbytes() for s in storages.values())
    assert kept[1] < kept[0] / 2, kept


# Collectives of one step, worked out by hand: four blocks and the root are five units. A unit is
# gathered in the forward, and again in the backward if it was freed between (the root only where
# told); its gradients are scattered once, and where it is replicated, summed. Sharded gradients
# need one sum more, for their norm.
COLLECTIVES = {
    "full": (9, 5, 1), "grad_op": (5, 5, 1), "reshard_true": (10, 5, 1), "reshard_false": (5, 5, 1), "reshard_2": (10, 5, 1),
    "no_shard": (0, 0, 1), "hybrid": (9, 5, 6), "hybrid_zero2": (5, 5, 6), "wrap_none": (1, 1, 1), "wrap_classes": (17, 9, 1),
    "wrap_embeddings": (13, 7, 1), "accumulation": (18, 5, 1), "accumulation_grad_op": (10, 5, 1), "accumulation_no_shard": (0, 0, 1),
    "accumulation_fsdp1": (18, 5, 1), "fsdp1_full": (9, 5, 1), "fsdp1_grad_op": (5, 5, 1), "fsdp1_hybrid": (9, 5, 6), "fsdp1_hybrid_zero2": (5, 5, 6),
}


def collectives(job: Job, root: Path) -> tuple[int, int, int]:
    """Counts all-gathers, reduce-scatters and all-reduces of gradients in one step, as torch's own
    profiler sees them.
    """
    meter = Meter(job.config, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step(job, meter)
    meter.close()
    names = [event.name for event in profile.events()]
    kinds = (("_allgather_base", "allgather"), ("_reduce_scatter_base",), ("allreduce",))
    return tuple(sum(names.count(f"c10d::{name}_") for name in kind) for kind in kinds)


def prove_collectives(root: Path) -> None:
    """Counts those of every variant, on as few ranks as it runs on with others."""
    for name, wanted in COLLECTIVES.items():
        if dist.get_world_size() == max(2, VARIANTS[name].min_ranks):
            job = build(*VARIANTS[name].options.split(), "optim.max_grad_norm=0")
            found = collectives(job, root)
            assert found == wanted, f"{name}: {found} instead of {wanted} all-gathers, reduce-scatters and all-reduces"


def prove_effects() -> None:
    """What leaves the losses as they are can be seen in what PyTorch was told."""
    job = build("fsdp.forward_prefetch=2", "fsdp.backward_prefetch=1", "compute.checkpoint_every=1")
    states = [find(job.model, f"layers.{i}")._get_fsdp_state() for i in range(4)]
    assert [[states.index(s) for s in state._states_to_forward_prefetch] for state in states] == [[1, 2], [2, 3], [3], []]
    assert [[states.index(s) for s in state._states_to_backward_prefetch] for state in states] == [[], [0], [1], [2]]
    job = build("fsdp.cpu_offload=true")
    state = job.model._get_fsdp_state()
    # before torch 2.13
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    assert all(p.offload_to_cpu for g in groups for p in g.fsdp_params)
    take_step(job, Meter(job.config, 0))
    assert all(p.grad is None for p in job.model.parameters())  # zeros would decay what was unused
    job = build("compute.compile=true", "compute.compile_backend=eager")
    assert all(find(job.model, f"layers.{i}")._compiled_call_impl is not None for i in range(4))
    calls = []
    job = build("fsdp.unshard_ahead=true")
    unshard, batch = type(job.model).unshard, type(job.plan.rows).batch
    type(job.model).unshard = lambda *a, **k: (calls.append("unshard"), unshard(*a, **k))[1]
    type(job.plan.rows).batch = lambda *a, **k: (calls.append("read"), batch(*a, **k))[1]
    take_step(job, Meter(job.config, 0))
    type(job.model).unshard, type(job.plan.rows).batch = unshard, batch
    assert calls[:2] == ["unshard", "read"], calls


def runs(name: str) -> bool:
    """Tells whether a variant fits this number of ranks."""
    variant, world_size = VARIANTS[name], dist.get_world_size()
    return world_size >= variant.min_ranks and not ("shard_size=2" in variant.options and world_size % 2)


def losses_of(directory: Path) -> list[float]:
    return [line["loss"] for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]


def _gap(losses: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


_plain: dict[object, list[float]] = {}


def reference_of(config: Config) -> list[float]:
    """Returns the losses of the plain loop; of variants with the same model and optimizer, once."""
    key = (str(config.model), config.optim.decay, config.optim.weight_decay, keeps_flat(config))
    if key not in _plain:
        _plain[key] = plain(config)
    return _plain[key]


def differs(name: str, root: Path) -> str:
    """Says how the losses of a variant differ from what they should be, or nothing."""
    variant = VARIANTS[name]
    losses = losses_of(root / name)
    if len(losses) != STEPS:
        return f"{len(losses)} lines"
    if variant.same_as:
        wanted = losses_of(root / variant.same_as)
        return "" if _gap(losses, wanted) <= ROUNDING else f"{losses} is not {variant.same_as}'s {wanted}"
    wanted = reference_of(config_of(variant, root))
    worst = _gap(losses, wanted)
    adds_otherwise = any(option in variant.options for option in ("accumulation", "use_orig_params=false", "loss_chunk"))
    reordered = not IS_CPU or dist.get_world_size() > 1 or adds_otherwise or variant.tolerance > 1e-3
    # one process adds up in the same order
    if worst > (variant.tolerance if reordered else ROUNDING):
        return f"{losses} is {worst:.1e} away from {wanted}"
    if variant.tolerance > 1e-3 and losses == losses_of(root / "full"):
        return "bfloat16 changed nothing"
    return ""


def main() -> None:
    root, names = Path(sys.argv[1]), sys.argv[2:] or list(VARIANTS)
    device.begin(is_default=False)
    torch.set_num_threads(1)
    world_size = dist.get_world_size()
    prove_memory()
    prove_effects()
    prove_collectives(root)
    if dist.get_rank() == 0:
        print("memory, effects and collectives are as they should be", flush=True)
    for name in filter(runs, names):
        variant = VARIANTS[name]
        try:
            train(prove(config_of(variant, root / name), world_size, world_size), device.here())
            dist.barrier()
            problem = differs(name, root) if dist.get_rank() == 0 else ""
        except Exception as error:
            print(f"rank {dist.get_rank()}: {name}", flush=True)
            traceback.print_exc()
            problem = repr(error)
            if world_size > 1:
                print(f"FAILED {name}: {problem}", flush=True)
                raise
        if dist.get_rank() == 0:
            print(f"FAILED {name}: {problem}" if problem else f"ok {name}", flush=True)
        torch.compiler.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
