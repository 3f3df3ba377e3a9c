"""Machines and what runs on them: figures with a source each, from the table that ships or from a file of the user's."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftsmith.specdec.models import pick

TABLE = Path(__file__).with_name("devices.yaml")


class Dtype(NamedTuple):
    """Bytes of a weight in a block, of one outside (quantised checkpoints leave embedding, head and norms as they were), of a number
    in the cache; in which format products are computed, best first."""

    weight: float
    outer: float
    cached: float
    computes: tuple[str, ...]

    def bytes(self, outer: float, blocks: float) -> float:
        """Of so many parameters outside and inside blocks."""
        return outer * self.outer + blocks * self.weight


DTYPES = {
    "fp32": Dtype(4, 4, 4, ("fp32",)),
    "bf16": Dtype(2, 2, 2, ("bf16", "fp16", "fp32")),
    "fp16": Dtype(2, 2, 2, ("fp16", "bf16", "fp32")),
    "fp8": Dtype(1, 2, 2, ("fp8", "bf16", "fp16", "fp32")),
    "int4": Dtype(0.5625, 2, 2, ("bf16", "fp16", "fp32")),  # 4 bits and a 16-bit scale for every 32 weights
}
WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Efficiency(BaseModel):
    """What serving reaches of a device; see devices.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bandwidth: float = Field(gt=0, le=1)
    flops: float = Field(gt=0, le=1)
    overlap: float = Field(ge=0, le=1)


class Device(BaseModel):
    """A machine; see devices.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    memory_gb: float = Field(gt=0)
    system_gb: float = Field(ge=0)
    bandwidth_gbs: float = Field(gt=0)
    tflops: dict[str, float]
    efficiency: Efficiency = Efficiency(bandwidth=0.85, flops=0.76, overlap=0.35)
    sources: dict[str, str] = {}

    def flops(self, dtype: Dtype) -> float:
        """Floating-point operations a second that are reached in the format that weights of `dtype` are computed in."""
        found = next((self.tflops[one] for one in dtype.computes if one in self.tflops), None)
        if found is None:
            raise ValueError(
                f"the device's tflops hold {', '.join(self.tflops) or 'nothing'}; give one of {', '.join(dtype.computes)}"
            )
        return found * 1e12 * self.efficiency.flops


class Engine(BaseModel):
    """What a serving engine adds, in milliseconds: to a call of the target and to each token of it, a round of speculation, a drafted
    token; and the least that a layer takes. `expands`: each token of a verified block reads the cache by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    call_ms: float = Field(ge=0)
    token_ms: float = Field(ge=0)
    round_ms: float = Field(ge=0)
    step_ms: float = Field(ge=0)
    layer_ms: float = Field(ge=0)
    expands: bool = False
    source: str = ""


def device_named(name: str) -> Device:
    """A device of the table, or one from a yaml file."""
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml", ".json"):
        if not path.is_file():
            raise FileNotFoundError(f"{name} does not exist (looked in {path.parent.resolve()})")
        return _device(yaml.safe_load(path.read_text(encoding="utf-8")), name)
    return _device(pick(_table()["devices"], name, "device (or a .yaml file of your own)"), name)


def engine_named(name: str) -> Engine:
    """An engine of the table."""
    return Engine(**pick(_table()["engines"], name, "engine"))


def devices() -> list[str]:
    """The names in the table."""
    return list(_table()["devices"])


def dtype_named(name: str) -> Dtype:
    return pick(DTYPES, WORDS.get(name, name), "dtype")


def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def _device(tree: Any, name: str) -> Device:
    if not isinstance(tree, dict):
        raise ValueError(f"{name}: a device is a mapping ({', '.join(Device.model_fields)}), found {type(tree).__name__}")
    try:
        return Device(**tree)
    except ValidationError as error:
        problems = []
        for one in error.errors():
            path = ".".join(map(str, one["loc"]))
            near = difflib.get_close_matches(path, Device.model_fields, n=1) if one["type"] == "extra_forbidden" else []
            problems.append(f"{path}: {one['msg'].lower()}" + (f"; did you mean {near[0]}?" if near else ""))
        raise ValueError(f"device {name}: " + "; ".join(problems)) from error
