"""A model of torchtitan, with torchtitan's optimizers and CheckpointManager:
`torchtitan_models_job.py OUT save HOW` makes two steps and saves them; `… OUT load HOW` loads step
2. HOW is `fused` or `separate` for a Llama, or `qwen3`, `qwen3_moe`, `deepseek_v3`, `gpt_oss`.

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


def config(how):
    """Returns the configuration of a small model, its class, and that of its adapter."""
    # kernels of a GPU, which need Triton: the models import them, and a CPU never calls them
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.rope import CosSinRoPE

    heads = {"n_layers": LAYERS, "dim": DIM, "n_heads": HEADS, "attn_backend": "flex"}
    size, experts = DIM // HEADS, {"num_experts": 4, "moe_hidden_dim": 8}
    if how.startswith("qwen3"):
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter as Adapter

        kind, whole = qwen3.Qwen3Model, qwen3._debugmodel_moe(attn_backend="flex")
        rope = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000)
        heads |= {"n_kv_heads": KV_HEADS, "head_dim": 8, "rope": rope, "fuse_qkv": True}
        layers = (
            qwen3._build_qwen3_moe_layers(**heads, **experts, top_k=2, moe_comm_backend="standard")
            if how == "qwen3_moe"
            else qwen3._build_qwen3_layers(**heads, hidden_dim=48)
        )
    elif how == "gpt_oss":
        from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter as Adapter

        kind = gpt_oss.GptOssModel
        whole = gpt_oss._debugmodel(attn_backend="flex", moe_comm_backend="standard")
        layers = gpt_oss._build_gptoss_layers(
            dim=DIM,
            n_layers=LAYERS,
            hidden_dim=8,
            num_experts=4,
            top_k=2,
            load_balance_coeff=1e-3,
            attn_backend="flex",
            moe_comm_backend="standard",
            rope=CosSinRoPE.Config(dim=64, max_seq_len=64, theta=10000),
        )
    elif how == "deepseek_v3":
        from torchtitan.models.deepseek_v3.state_dict_adapter import (
            DeepSeekV3StateDictAdapter as Adapter,
        )

        kind = deepseek_v3.DeepSeekV3Model
        whole = deepseek_v3._debugmodel(attn_backend="flex", moe_comm_backend="standard")
        layers = deepseek_v3._build_dsv3_layers(
            **heads,
            **experts,
            n_dense_layers=1,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=4,
            mscale=0.7,
            dense_hidden_dim=48,
            num_shared_experts=1,
            router_top_k=2,
            router_score_func="sigmoid",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000),
        )
    else:
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter as Adapter

        kind, whole = llama3.Llama3Model, llama3._debugmodel(attn_backend="flex")
        layers = llama3._build_llama3_layers(
            **heads,
            fuse_qkv=how == "fused",
            n_kv_heads=KV_HEADS,
            hidden_dim=48,
            rope=ComplexRoPE.Config(dim=size, max_seq_len=64, theta=10000),
        )
    made = dataclasses.replace(
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
    return made, kind, Adapter


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
    out, mode, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo")
    torch.manual_seed(0 if mode == "save" else 1)
    made, kind, adapter = config(how)
    model = kind(made)
    for buffer in model.buffers():
        buffer.normal_() if buffer.is_floating_point() else buffer.zero_()
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
    adapter = adapter(made, None)
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
