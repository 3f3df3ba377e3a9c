"""What `accelerate launch` makes of the configs that ship: its own parser and its own preparation, up to where it would start processes."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent / "recipes" / "accelerate"


def parsed(name: str, *words: str) -> Namespace:
    """The launcher's arguments after it has read the config."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    asked = ["--config_file", str(CONFIGS / f"{name}.yaml"), *words, "-m", "draftsmith.train", "RECIPE"]
    args = launch_command_parser().parse_args(asked)
    return _validate_launch_command(args)[0]


def environment_of(name: str, *words: str) -> dict[str, str]:
    """What the launcher adds to the environment of the processes that it starts."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    args: Any = parsed(name, "--main_process_port", "0", *words)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        told = prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        told = prepare_multi_gpu_env(args)
    else:
        told = prepare_simple_launcher_cmd_env(args)[1]
    skipped = {"PYTHONPATH", "OMP_NUM_THREADS", *os.environ}
    return {key: value for key, value in told.items() if key not in skipped}
