"""A model of torchtitan on a mesh, by torchtitan's own `parallelize`, as stock torch saves it:
`torchtitan_mesh_job.py OUT HOW AXES`; HOW is that of `torchtitan_models_job.py`, AXES such as
`fsdp=2,tp=2`.
"""

import dataclasses
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.tools import utils

warnings.simplefilter("ignore")


def main():
    out, how, axes = sys.argv[1:]
    told = {axis: int(n) for axis, n in (part.split("=") for part in axes.split(","))}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    utils.device_type = "cpu"  # else that of a GPU, where none is
    from torchtitan_models_job import config

    made, kind, _ = config(how)
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

    dims = ParallelDims(
        dp_replicate=told.get("replicate", 1),
        dp_shard=told.get("fsdp", 1),
        cp=1,
        tp=told.get("tp", 1),
        pp=1,
        ep=told.get("ep", 1),
        world_size=dist.get_world_size(),
        spmd_backend="partial_dtensor",
    )
    family = sys.modules[kind.__module__.rpartition(".")[0]]
    name = family.__name__.rpartition(".")[2]
    sharding = __import__(f"{family.__name__}.sharding", fromlist=["sharding"])
    given = {} if name == "llama3" else {"enable_ep": dims.ep > 1}
    getattr(sharding, f"set_{name}_sharding_config")(made, enable_sp=True, **given)
    model = kind(made)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    parallelize = __import__(f"{family.__name__}.parallelize", fromlist=["parallelize"])
    function = next(
        f for n, f in vars(parallelize).items() if n.startswith("parallelize_") and callable(f)
    )
    function(
        model,
        parallel_dims=dims,
        training=dataclasses.replace(TrainingConfig(), mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    dcp.save(dict(model.named_parameters()), checkpoint_id=out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
