"""A Llama of torchtitan, with torchtitan's optimizers and CheckpointManager:
`torchtitan_llama_job.py OUT save` makes two steps and saves them; `… OUT load` loads step 2.

`OUT/save.pt` or `OUT/load.pt` is what it then has. `OUT/hf.pt` is what torchtitan's own adapter
makes of the model, and of each kind of moments.
"""

import dataclasses
import sys
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

warnings.simplefilter("ignore")
DIM, HEADS, KV_HEADS, LAYERS, VOCAB = 32, 8, 2, 2, 64


def config(is_fused):
    """Returns the configuration of a small Llama."""
    # kernels of a GPU, which need Triton: the models import them, and a CPU never calls them
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.llama3 import _build_llama3_layers, _debugmodel

    whole = _debugmodel(attn_backend="flex")
    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=64, theta=10000)
    layers = _build_llama3_layers(
        fuse_qkv=is_fused,
        n_layers=LAYERS,
        dim=DIM,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        hidden_dim=48,
        rope=rope,
        attn_backend="flex",
    )
    return dataclasses.replace(
        whole,
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=dataclasses.replace(
            whole.tok_embeddings, num_embeddings=VOCAB, embedding_dim=DIM
        ),
        norm=dataclasses.replace(whole.norm, normalized_shape=DIM),
        lm_head=dataclasses.replace(whole.lm_head, in_features=DIM, out_features=VOCAB),
        layers=layers,
    )


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def as_model(model, optim, kind):
    """Returns moments of one kind under the names of the model's state dict, by the model's own
    hooks.
    """
    values = {
        name.removeprefix("state.").removesuffix(f".{kind}"): value
        for name, value in optim.items()
        if name.startswith("state.") and name.endswith(f".{kind}")
    }
    for name, module in model.named_modules():
        if hasattr(module, "_split_qkv_on_save"):
            type(module)._split_qkv_on_save(module, values, f"{name}.", {})
    return values


def main():
    out, mode, is_fused = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "fused"
    dist.init_process_group("gloo")
    torch.manual_seed(0 if mode == "save" else 1)
    made = config(is_fused)
    from torchtitan.models.llama3.model import Llama3Model
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    model = Llama3Model(made)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(
        optimizers=optimizers, training_steps=10
    )
    manager = CheckpointManager.Config(enable=True, folder="run", interval=2).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(out),
    )
    if mode == "save":
        for step in (1, 2):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizers.step()
            schedulers.step()
            manager.save(step)
    else:
        assert manager.load()
    state = {n: full(t) for n, t in model.state_dict().items()}
    optim = {n: full(v) for n, v in optimizers.state_dict().items()}
    adapter = Llama3StateDictAdapter(made, None)
    if dist.get_rank() == 0:
        torch.save({"model": state, "optim": optim}, out / f"{mode}.pt")
        parts = {"model": dict(state)} | {
            kind: as_model(model, optim, kind) for kind in ("exp_avg", "exp_avg_sq")
        }
        torch.save({kind: adapter.to_hf(values) for kind, values in parts.items()}, out / "hf.pt")
    dist.barrier()
    manager.close()


if __name__ == "__main__":
    main()
