"""The options of each command; what is not said keeps the default of the settings that the command fills."""

from __future__ import annotations

import argparse
from pathlib import Path


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="where the answers go (default: answers.jsonl in the run folder)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N rows with what of them is scored")


def export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", help="instead of the recipe's export.format")
    parser.add_argument("--force", action="store_true", help="replace an export that is there")


def push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="what `draftsmith export` wrote, such as runs/NAME/export/transformers")
    parser.add_argument("repository", metavar="OWNER/NAME", help="where to; it is made where there is none")
    parser.add_argument("--public", action="store_true", help="for all to see, if it is made now")


def generate(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, argparse.SUPPRESS  # what is not said keeps the default of `show.Asked`
    add("prompt", help="the text to answer; - reads stdin")
    add("--target", required=True, metavar="NAME", help="a hub id, a folder, a .gguf file or package:NAME/FILE")
    add(
        "--draft", default=default, metavar="NAME", help="who drafts: a model as for --target, exit:LAYER, ngram; without it nobody"
    )
    add("--ngram", default=default, action="store_true", help="draft what followed the same words before; --draft speaks elsewhere")
    add("-k", default=default, type=int, metavar="N", help="tokens drafted for a call of the target, 4")
    add("--adaptive", default=default, action="store_true", help="draft up to k tokens, as many as pay")
    add("--max-new-tokens", default=default, type=int, metavar="N", help="128")
    add("--temperature", default=default, type=float, metavar="T", help="0 is greedy, and the default")
    add("--top-k", default=default, type=int, metavar="N", help="0 is off, and the default")
    add("--top-p", default=default, type=float, metavar="P", help="1 is off, and the default")
    add("--seed", default=default, type=int, metavar="N", help="0")
    add("--system", default=default, metavar="TEXT", help="the system's turn of the chat")
    add("--raw", default=default, action="store_true", help="continue the prompt as it is, without the chat template")
    add("--stop", default=default, action="append", metavar="STRING", help="a text that ends the answer; may be given again")
    add("--threads", default=default, type=int, metavar="N", help="of the processor, for torch")
    add("--dtype", default=default, metavar="NAME", help="fp32 (the default), bf16 or fp16")
    add("--plain", default=default, action="store_true", help="no colours and no live count, as into a pipe")
    add("--compare", default=default, action="store_true", help="decode without the draft too, and say what it was worth")


def plan(parser: argparse.ArgumentParser) -> None:
    add, default = parser.add_argument, argparse.SUPPRESS  # what is not said keeps the default of `plan.Asked`
    add("--target", required=True, metavar="NAME", help="a hub id (only its config is fetched), a folder, a config.json, a .gguf")
    add("--draft", required=True, metavar="NAME", help="the same; or exit:E, layers:N of the target, ngram, cost:C of its call")
    add("--device", required=True, metavar="NAME", help="dgx-spark, h200 ... or a .yaml file of your own (docs/plan.md)")
    add(
        "--alpha", default=default, nargs="+", metavar="A", help="acceptance; 0.8,0.7 by position; the verdict is at the middle one"
    )
    add("--k", default=default, type=int, metavar="N", help="tokens drafted for a call; the best of 1 to 16")
    add("--context", default=default, type=int, metavar="N", help="tokens of a sequence, 4096")
    add("--batch", default=default, type=int, metavar="N", help="sequences at a time, 1")
    add("--dtype", default=default, metavar="NAME", help="of the weights: fp32, bf16, fp16, fp8, int4; the config's")
    add("--draft-dtype", default=default, metavar="NAME", help="of the draft's weights; the target's")
    add("--draft-vocabulary", default=default, type=int, metavar="N", help="ids that the draft's head is trimmed to")
    add(
        "--engine",
        default=default,
        metavar="NAME",
        help="served (launches captured in graphs, the default), expanded, eager or ideal",
    )
    add("--processes", default=default, type=int, metavar="N", help="of a training run that is spread, 8")
    add("--tokens", default=default, type=int, metavar="N", help="of a micro-batch of training, 4096")
    add("--json", action="store_true", help="print facts, in bytes and seconds, instead of tables")


def sweep(parser: argparse.ArgumentParser) -> None:
    add, default = (
        parser.add_argument,
        argparse.SUPPRESS,
    )  # what is not said keeps the recipe's value, or the default of `sweep.Asked`
    add("recipe", nargs="?", help="whose target and evaluation are meant; the options below go before its values")
    add("--target", default=default, metavar="NAME", help="a hub id, a folder, a .gguf file or package:NAME/FILE")
    add("--prompts", default=default, metavar="FILE", help="held-out prompts: JSONL with prompt, turns or messages")
    add(
        "--drafters", default=default, nargs="+", metavar="NAME",
        help="exit:3,6,9 (three exits), FOLDER:3,6,9 (trained ones), a folder, ngram ...; exits through the first half",
    )  # fmt: skip
    add("--k", default=default, nargs="+", type=int, metavar="N", help="tokens drafted a round; 1 2 3 4 6 8")
    add("--per-kind", default=default, type=int, metavar="N", help="prompts of each kind, the first ones; 0 takes all")
    add("--max-new-tokens", default=default, type=int, metavar="N", help="48")
    add("--temperature", default=default, type=float, metavar="T", help="0 is greedy, and the default")
    add("--dtype", default=default, metavar="NAME", help="fp32 (the default), bf16 or fp16")
    add(
        "--decoding",
        default=default,
        metavar="HOW",
        help="as_loaded (the default), or prepared: fp32 on a CPU made fast for few tokens",
    )
    add("--threads", default=default, type=int, metavar="N", help="of the processor, for torch; 1")
    add("--seed", default=default, type=int, metavar="N", help="0")
    add("--out", default=default, metavar="FOLDER", help="sweep in the run folder, or here")


def compat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", help="the model whose text is wanted: a hub id, a folder, a .gguf file or package:NAME/FILE"
    )
    parser.add_argument("draft", metavar="DRAFT", help="the model that is to draft for it")


def compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reports", nargs="+", metavar="REPORT", help="run folders, or report.json files; the others are held against the first"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it as a page too, such as compare.html")
