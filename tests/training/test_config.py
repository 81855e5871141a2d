"""The configuration: keys and values, what contradicts itself, meshes that do not fit; and
Accelerate's files.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

from training import config as configuration
from training.checks import check, degrees
from training.config import Config, ConfigError, resolve
from training.extras import accelerate_config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", "unknown key optim.learning_rate: "),
        ("optim.betas1=1", "did you mean optim.beta1?"),
        ("optimizer.lr=1", "unknown key optimizer: did you mean optim?"),
        (
            "fsdp.strategy=ZERO3",
            "fsdp.strategy = 'ZERO3': expected 'FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD'",
        ),
        ("precision.param=bf16", "precision.param = 'bf16': expected '', 'float32', 'bfloat16'"),
        ("run.steps=ten", "run.steps = 'ten': expected a valid integer"),
        ("run.steps=1.5", "run.steps = 1.5: expected a valid integer"),
        ("run.steps=true", "run.steps = True: expected a valid integer"),
        ("optim.lr=fast", "optim.lr = 'fast': expected a valid number"),
        ("fsdp.cpu_offload=1", "fsdp.cpu_offload = 1: expected a valid boolean"),
        (
            "fsdp.reshard_after_forward=half",
            "fsdp.reshard_after_forward = 'half': expected a valid boolean or a valid integer",
        ),
        ("fsdp.wrap_classes=3", "fsdp.wrap_classes = 3: expected a valid list"),
        ("run=here", "run = 'here': expected a table"),
        ("run.steps", "--set takes table.key=value, got 'run.steps'"),
        (
            "precision.overrides.norm=3",
            "precision.overrides.norm = 3: expected 'float32'",
        ),
    ],
)
def test_an_unknown_key_or_a_bad_value_is_named_with_what_is_allowed(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(None, [override])
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["fsdp.tensor_parallel=3"], 4, "fsdp.tensor_parallel = 3 does not divide 4 ranks"),
        (
            ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=3"],
            4,
            "fsdp.shard_size = 3 does not divide the 4 ranks",
        ),
        (
            ["data.batch_size=6"],
            4,
            "data.batch_size = 6 is not a multiple of 4 data-parallel ranks x 1 micro-batches",
        ),
        (
            ["data.accumulation=5"],
            2,
            "data.batch_size = 16 is not a multiple of 2 data-parallel ranks x 5 micro-batches",
        ),
        (["fsdp.reshard_after_forward=3"], 4, "a number must divide the 4 ranks"),
        (["fsdp.reshard_after_forward=4"], 4, "be neither 1 nor all of them"),
        (
            ["fsdp.shard_size=2"],
            4,
            'fsdp.shard_size = 2 changes nothing without fsdp.strategy = "HYBRID_SHARD',
        ),
        (
            ["fsdp.api=fsdp1", "fsdp.tensor_parallel=2"],
            4,
            'fsdp.tensor_parallel = 2 changes nothing without fsdp.api = "fsdp2"',
        ),
        (
            ["fsdp.api=fsdp1", "fsdp.reshard_after_forward=2"],
            4,
            'fsdp.reshard_after_forward = 2 changes nothing without fsdp.api = "fsdp2"',
        ),
        (
            ["fsdp.api=fsdp1", "precision.overrides.norm=float32"],
            1,
            "precision.overrides = {'norm': 'float32'} changes nothing without",
        ),
        (
            ["fsdp1.use_orig_params=false"],
            1,
            'fsdp1.use_orig_params = False changes nothing without fsdp.api = "fsdp1"',
        ),
        (
            ["fsdp.strategy=NO_SHARD", "fsdp.tensor_parallel=2"],
            2,
            "fsdp.tensor_parallel = 2 changes nothing without sharded parameters",
        ),
        (
            ["fsdp.strategy=NO_SHARD", "fsdp.cpu_offload=true"],
            2,
            "fsdp.cpu_offload = True changes nothing without sharded parameters",
        ),
        (["fsdp.wrap=classes"], 1, 'fsdp.wrap = "classes" needs fsdp.wrap_classes'),
        (["fsdp.wrap_classes=Block"], 1, 'changes nothing without fsdp.wrap = "classes"'),
        (
            ["precision.overrides.norm=fp32"],
            1,
            "precision.overrides.norm = 'fp32': expected 'float32'",
        ),
        (["precision.param=float16"], 1, "float16 needs a scaled loss"),
        (
            ["precision.buffer=bfloat16"],
            1,
            "precision.buffer = 'bfloat16' changes nothing without fsdp.api",
        ),
        (
            ["model.path=x", "model.dim=3", "data.train=y"],
            1,
            "model.dim = 3 changes nothing without the built-in decoder",
        ),
        (
            ["metrics.validate_every=3"],
            1,
            "data.validation, a token file, and metrics.validate_every, steps, need each other",
        ),
        (["data.validation=x"], 1, "need each other"),
        (["precision.overrides.norm=float16"], 1, "expected 'float32' or 'bfloat16'"),
        (["run.steps=0"], 1, "run.steps = 0: expected greater than or equal to 1"),
    ],
)
def test_what_does_not_fit_together_or_the_ranks_is_one_clear_line(
    overrides: list[str], ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check(resolve(None, overrides), ranks, ranks)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("strategy", "shard_size", "tensor", "world", "node", "expected"),
    [
        ("FULL_SHARD", 0, 1, 8, 4, (1, 8, 1)),
        ("SHARD_GRAD_OP", 0, 2, 8, 4, (1, 4, 2)),
        ("NO_SHARD", 0, 1, 8, 4, (8, 1, 1)),
        ("HYBRID_SHARD", 0, 1, 8, 4, (2, 4, 1)),
        ("HYBRID_SHARD", 0, 2, 16, 8, (2, 4, 2)),
        ("HYBRID_SHARD", 2, 1, 8, 4, (4, 2, 1)),
        ("HYBRID_SHARD", 0, 1, 1, 1, (1, 1, 1)),
    ],
)
def test_a_mesh_is_replicate_by_shard_by_tensor(
    strategy: str, shard_size: int, tensor: int, world: int, node: int, expected: tuple[int, ...]
) -> None:
    config = resolve(
        None,
        [
            f"fsdp.strategy={strategy}",
            f"fsdp.shard_size={shard_size}",
            f"fsdp.tensor_parallel={tensor}",
        ],
    )
    sizes = degrees(config, world, node)
    assert (sizes.replicate, sizes.shard, sizes.tensor) == expected


def test_the_command_line_goes_over_the_file_and_the_result_reads_back_as_it_is(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        "[run]\nsteps = 7\n[optim]\nlr = 1\n[fsdp]\nreshard_after_forward = 2\nwrap ="
        ' "classes"\nwrap_classes = ["A", "B"]\n[precision.overrides]\n"*.norm" = "float32"\n'
    )
    config = resolve(
        file,
        [
            "run.steps=9",
            "precision.overrides.head.*=bfloat16",
            'run.dir="a b"',
            "fsdp.strategy=SHARD_GRAD_OP",
        ],
    )
    assert (config.run.steps, config.optim.lr, config.run.dir) == (9, 1.0, "a b")
    assert config.fsdp.reshard_after_forward == 2 and config.fsdp.wrap_classes == ["A", "B"]
    assert config.precision.overrides == {"*.norm": "float32", "head.*": "bfloat16"}
    (tmp_path / "resolved.toml").write_text(configuration.to_toml(config))
    assert resolve(tmp_path / "resolved.toml") == config
    assert resolve(file, ["fsdp.reshard_after_forward=default"]).fsdp.reshard_after_forward is None
    tomllib.loads((tmp_path / "resolved.toml").read_text())


@pytest.mark.parametrize("text", ["[run", "run = \xff", "[run]\nsteps = 1\nsteps = 2\n"])
def test_a_broken_file_is_one_clear_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="not a TOML file: .*config.toml"):
        resolve(file)
    with pytest.raises(ConfigError, match="cannot read the configuration: No such file"):
        resolve(tmp_path / "nothing.toml")


# ---- Accelerate ----------------------------------------------------------------------------------

V1 = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "fsdp_config": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer, Block",
        "fsdp_use_orig_params": False,
        "fsdp_version": 1,
    },
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
V2: dict[str, Any] = {
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": True,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": 2000,
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": False,
        "fsdp_cpu_ram_efficient_loading": False,
    },
}


def mapped(given: dict[str, Any], tmp_path: Path) -> tuple[Config, list[str]]:
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump(given))
    read = accelerate_config.read(str(file))
    return resolve(None, (), read.tables), read.notes


def changed(given: dict[str, Any], **fsdp: Any) -> dict[str, Any]:
    return given | {"fsdp_config": given["fsdp_config"] | fsdp}


def test_a_file_of_version_1_maps(tmp_path: Path) -> None:
    config, notes = mapped(V1, tmp_path)
    assert (config.fsdp.api, config.fsdp.strategy) == ("fsdp1", "SHARD_GRAD_OP")
    assert (config.fsdp.wrap, config.fsdp.wrap_classes) == (
        "classes",
        ["LlamaDecoderLayer", "Block"],
    )
    assert (
        config.fsdp1.use_orig_params,
        config.fsdp1.sync_module_states,
        config.fsdp1.forward_prefetch,
    ) == (False, True, True)
    assert (
        config.fsdp1.backward_prefetch == "BACKWARD_POST" and config.compute.checkpoint_every == 1
    )
    assert (config.precision.param, config.precision.reduce, config.precision.buffer) == (
        "bfloat16",
    ) * 3
    assert [n.split(" ")[0] for n in notes] == [
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_config.fsdp_state_dict_type",
        "machine_rank",
        "num_machines",
        "num_processes",
        "rdzv_backend",
        "same_network",
        "use_cpu",
    ]


def test_a_file_of_version_2_maps(tmp_path: Path) -> None:
    config, _ = mapped(V2, tmp_path)
    assert (config.fsdp.api, config.fsdp.strategy, config.fsdp.cpu_offload) == (
        "fsdp2",
        "FULL_SHARD",
        True,
    )
    assert (config.fsdp.wrap, config.fsdp.min_num_params, config.precision.param) == (
        "size",
        2000,
        "",
    )
    config, _ = mapped(changed(V2, fsdp_reshard_after_forward=False), tmp_path)
    assert config.fsdp.strategy == "SHARD_GRAD_OP"
    config, _ = mapped(
        V2
        | {
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 4,
            }
        },
        tmp_path,
    )
    assert (config.fsdp.strategy, config.fsdp.shard_size) == ("HYBRID_SHARD", 4)
    config, _ = mapped(V2 | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, tmp_path)
    assert config.compute.compile and config.compute.compile_backend == "inductor"


@pytest.mark.parametrize("number", range(1, 6))
def test_a_strategy_may_be_a_number_as_in_old_files(number: int, tmp_path: Path) -> None:
    from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

    given = changed(V1, fsdp_sharding_strategy=number)
    del given["fsdp_config"]["fsdp_reshard_after_forward"]
    assert mapped(given, tmp_path)[0].fsdp.strategy == FSDP_SHARDING_STRATEGY[number - 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            V1 | {"mixed_precision": "fp16"},
            "mixed_precision: 'fp16' is refused: fp16 needs a scaled loss",
        ),
        (V1 | {"mixed_precision": "fp8"}, "mixed_precision: 'fp8' is refused"),
        (
            V1 | {"distributed_type": "DEEPSPEED"},
            "distributed_type: 'DEEPSPEED' is refused: the file is for another kind of job",
        ),
        (V1 | {"debug": True}, "debug: True is refused: set TORCH_DISTRIBUTED_DEBUG"),
        (V1 | {"speed": 3}, "speed: unknown key"),
        (changed(V1, fsdp_magic=1), "fsdp_config.fsdp_magic: unknown key"),
        (
            changed(V1, fsdp_ignored_modules=".*norm"),
            "fsdp_config.fsdp_ignored_modules: '.*norm' is refused: every parameter is sharded",
        ),
        (
            changed(V1, fsdp_auto_wrap_policy="MAGIC"),
            "fsdp_config.fsdp_auto_wrap_policy: 'MAGIC': allowed are TRANSFORMER_BASED_WRAP",
        ),
        (
            changed(V1, fsdp_use_orig_params="maybe"),
            "fsdp_config.fsdp_use_orig_params: expected true or false",
        ),
        (
            changed(V1, fsdp_reshard_after_forward="ZERO"),
            "fsdp.strategy = 'ZERO': expected 'FULL_SHARD'",
        ),
        (changed(V2, fsdp_version=3), "fsdp_config.fsdp_version: expected 1 or 2, got 3"),
        (
            V2 | {"parallelism_config": {"parallelism_config_cp_size": 2}},
            "parallelism_config_cp_size: 2 is refused: no context parallelism",
        ),
        ({"model": 3}, "not a configuration of Accelerate"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        mapped(given, tmp_path)
    assert message in str(raised.value)


def test_every_key_that_accelerate_knows_is_in_the_table() -> None:
    tables = ("fsdp_config", "dynamo_config", "parallelism_config")
    known = {field.name for field in fields(ClusterConfig)} - set(tables)
    for action in launch_command_parser()._actions:
        name = action.dest
        for prefix, table in (
            ("fsdp_", "fsdp_config"),
            ("dynamo_", "dynamo_config"),
            ("parallelism_config_", "parallelism_config"),
        ):
            if name.startswith(prefix):
                known.add(f"{table}.{name}")
    assert len(known) > 50
    assert known - set(accelerate_config.KEYS) == set()


def test_the_documented_table_is_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    assert accelerate_config.table() in text


def test_the_documented_configuration_is_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    documented = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    assert resolve(None, (), documented) == Config()
    for name, table in Config().model_dump().items():
        assert set(table) - set(documented[name]) <= {"reshard_after_forward"}
