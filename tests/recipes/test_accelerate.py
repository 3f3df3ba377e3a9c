"""The configs that ship for `accelerate launch`: its loader knows every key, and each starts what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from launches import CONFIGS, environment_of, parsed

# What is started, of how many processes on how many machines, and what the processes are told of their engine.
STARTS = {
    "single": ("NO", 1, 1, {}),
    "ddp": ("MULTI_GPU", 8, 1, {}),
    "fsdp2": (
        "FSDP", 8, 1,
        {
            "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        },
    ),
    "zero2": ("DEEPSPEED", 8, 1, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}),
    "zero3": (
        "DEEPSPEED", 8, 1,
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"},
    ),
    "multinode": ("MULTI_GPU", 16, 2, {}),
}  # fmt: skip


def test_every_config_is_told_here() -> None:
    assert {one.stem for one in CONFIGS.iterdir()} == STARTS.keys()


@pytest.mark.parametrize("name", STARTS)
def test_accelerate_knows_every_key_and_starts_what_the_name_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ("ACCELERATE_USE_CPU", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(one, raising=False)
    kind, processes, machines, told = STARTS[name]
    loaded = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert (loaded.distributed_type.value, loaded.num_processes, loaded.num_machines) == (kind, processes, machines)
    assert loaded.use_cpu is False  # true starts one process
    args = parsed(name)
    assert (args.use_fsdp, args.use_deepspeed, args.multi_gpu) == (kind == "FSDP", kind == "DEEPSPEED", kind == "MULTI_GPU")
    assert args.module is True
    environment = environment_of(name)
    assert {key: environment.get(key) for key in told} == told
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize("name", STARTS)
def test_every_key_does_something(name: str) -> None:
    """accelerate takes any key within a section, and nothing for a top one that its launcher has a default of its own for."""
    assert idle(CONFIGS / f"{name}.yaml") == []


def test_a_key_that_does_nothing_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text((CONFIGS / "fsdp2.yaml").read_text() + "  fsdp_offload_parms: true\n")
    assert idle(path) == ["fsdp_offload_parms"]
    path.write_text((CONFIGS / "ddp.yaml").read_text() + "rdzv_backend: c10d\n")
    assert idle(path) == ["rdzv_backend"]
    path.write_text((CONFIGS / "fsdp2.yaml").read_text() + "processes: 2\n")
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(path))


HANDLED = ("compute_environment", "distributed_type", "mixed_precision", "gpu_ids", "use_cpu", "fsdp_config", "deepspeed_config")


def idle(path: Path) -> list[str]:
    known = vars(launch_command_parser().parse_args(["x"]))
    config = yaml.safe_load(path.read_text())
    sections = [key for section in ("fsdp_config", "deepspeed_config") for key in config.get(section, {}) if key not in known]
    return sections + [key for key in config if key not in HANDLED and known.get(key) is not None]


def test_two_machines_meet_at_one_address() -> None:
    args = parsed("multinode", "--machine_rank", "1", "--main_process_ip", "10.1.2.3", "--num_processes", "4")
    from accelerate.utils.launch import prepare_multi_gpu_env

    prepare_multi_gpu_env(args)
    assert (args.rdzv_endpoint, args.node_rank, args.nnodes, args.nproc_per_node) == ("10.1.2.3:29500", 1, "2", "2")
