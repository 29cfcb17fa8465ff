"""One stage of training: losses, optimisers, the schedule, and checkpoints from which it goes on exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from zipfile import ZipFile

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed
from transformers import PreTrainedModel

from stree.distill.folder import reading
from stree.distill.network import Compile, hidden_states
from stree.distill.settings import Settings
from stree.distill.text import Batches
from stree.files import replacing

__all__ = [
    "Budget", "Logits", "LossFn", "compiler", "distill_loss", "matmul_dtype", "mean_over_rows", "probs_of", "text_loss",
    "train",
]  # fmt: skip

LossFn = Callable[[Any, Tensor], Tensor]  # of a model or head, and windows
Logits = Callable[[Tensor], Tensor]  # int64[batch, length] tokens -> float[batch, length, vocab] logits of the target
Budget = tuple[Literal["steps", "seconds"], float]
LOGITS_AT_ONCE = 1 << 26  # logits of a loss that are kept for its gradient; more are computed again, part by part


def schedule(progress: float, warmup: float, decay: float) -> float:
    """Learning-rate factor at a share of the budget: linear warm-up, flat, linear decay to zero over the last share."""
    progress = min(max(progress, 0.0), 1.0)
    return min(1.0, (progress + 1e-3) / (warmup + 1e-3), (1.0 - progress) / decay)


def make_optimizers(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices, AdamW for the embedding, the convolutions and all vectors."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    matrices = [p for p in model.parameters() if p.ndim == 2 and not any(p is weight for weight in embeddings)]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = torch.optim.Muon(
        matrices, lr=settings.muon_lr, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    groups = [{"params": embeddings, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=settings.adam_lr, betas=(0.9, 0.95), eps=1e-10)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def matmul_dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """Choose the dtype of matmuls; in eager mode bfloat16 is slower than float32 on a CPU."""
    return settings.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)


def compiler(settings: Settings) -> Compile:
    """``torch.compile`` for fixed shapes, or the identity."""
    return partial(torch.compile, dynamic=False) if settings.compile else lambda function: function


def text_loss(settings: Settings) -> LossFn:
    """Mean cross-entropy in nats of the next token on windows int64[batch, length + 1]."""

    def of_logits(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum")

    return _loss(settings, of_logits, lambda windows: windows[:, 1:])


def distill_loss(probs: Logits, settings: Settings) -> LossFn:
    """Mean KL divergence in nats from the target's next-token distribution to the drafter's, at temperature 1."""

    def of_logits(logits: Tensor, target_logits: Tensor) -> Tensor:
        target = target_logits.float().log_softmax(-1)
        return (target.exp() * (target - logits.log_softmax(-1))).sum()

    return _loss(settings, of_logits, torch.no_grad()(lambda windows: probs(windows[:, :-1])))


def _loss(
    settings: Settings, of_logits: Callable[[Tensor, Tensor], Tensor], labels_of: Callable[[Tensor], Tensor]
) -> LossFn:
    """Mean over positions of a loss of float32[rows, vocab] logits and the rows that ``labels_of`` makes of windows."""

    def head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        dtype = matmul_dtype(settings, hidden.device)
        return of_logits(F.linear(hidden.to(dtype), weight.to(dtype)).float(), labels)

    head = compiler(settings)(head)

    def loss(model: PreTrainedModel, windows: Tensor) -> Tensor:
        return mean_over_rows(head, model, hidden_states(model, windows[:, :-1]), labels_of(windows))

    return loss


def mean_over_rows(head: Callable[..., Tensor], model: Any, hidden: Tensor, wanted: Tensor) -> Tensor:
    """Average a loss over positions, some at a time where the vocabulary is large.

    Args:
        head: sums the loss over float[rows, hidden], the head's weight and what is wanted of the rows.
        model: the drafter, for its output head.
        hidden: float[batch, length, hidden].
        wanted: [batch, length, ...].
    """
    weight = cast(Tensor, model.get_output_embeddings().weight)
    rows, wanted = hidden.flatten(0, 1), wanted.flatten(0, 1)
    size = max(1, LOGITS_AT_ONCE // weight.shape[0])
    if len(rows) <= size:
        return head(rows, weight, wanted) / len(rows)
    parts = zip(rows.split(size), wanted.split(size), strict=True)
    sums = [recomputed(head, part, weight, other, use_reentrant=False) for part, other in parts]
    return torch.stack(sums).sum() / len(rows)


def probs_of(target: PreTrainedModel, dtype: torch.dtype) -> Logits:
    """Make the function that gives a target's logits; float32 weights are multiplied in ``dtype`` (autocast)."""
    own = target.get_input_embeddings().weight
    lowered = dtype != torch.float32 and own.dtype == torch.float32

    def probs(tokens: Tensor) -> Tensor:
        with torch.autocast(own.device.type, dtype, enabled=lowered):
            return cast(Tensor, target(tokens, use_cache=False).logits)

    return probs


def train(
    path: Path,
    model: nn.Module,
    loss_fn: LossFn,
    batches: Batches,
    settings: Settings,
    budget: Budget,
    *,
    resume: bool = False,
) -> dict[str, float]:
    """Train a model, whose forward is the training one, for some time or steps, with checkpoints.

    Args:
        path: of the stage's checkpoint; its name without ending is the stage's.
        model: trained in place, on its own device.
        loss_fn: loss in nats of a batch of windows.
        batches: source of windows.
        settings: batch size, learning rates and schedule.
        budget: steps, or seconds with those before a resumption included.
        resume: continue from the stage's checkpoint where there is one.

    Returns:
        Steps, tokens, seconds and the final smoothed loss.

    Raises:
        RuntimeError: the loss is no longer finite, after the last step either; the last checkpoint stays.
    """
    stage = _Stage(path, model.train(), make_optimizers(model, settings), batches)
    if resume and path.exists():
        stage.load()
    done, (key, most), device = stage.done, budget, next(model.parameters()).device
    last = last_save = time.monotonic()
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    windows = None
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(path.stem, total=most, loss=done["loss"])
        while done[key] < most:
            factor = schedule(done[key] / most, settings.warmup, settings.decay)
            windows = batches.next(settings.batch_size).to(device)
            value = _step(model, loss_fn(model, windows), stage.optimizers, factor, settings.clip)
            _check_finite(path.stem, value, int(done["steps"]))
            now = time.monotonic()
            stage.count(value, windows[:, 1:].numel(), now - last)
            last = now
            bar.update(task, completed=min(done[key], most), loss=done["loss"])
            if now - last_save >= settings.save_every:
                stage.save()
                last_save = now
    if windows is not None:  # else nothing was left to do
        with torch.no_grad():
            _check_finite(path.stem, loss_fn(model, windows).item(), int(done["steps"]))
    stage.save()
    return done


def _check_finite(stage: str, loss: float, step: int) -> None:
    """Refuse a loss that is not finite."""
    if not math.isfinite(loss):
        raise RuntimeError(f"{stage}: the loss is {loss} at step {step}; lower learning rates")


@dataclass(slots=True)
class _Stage:
    """What a checkpoint holds, and what was done: steps, tokens, seconds and the smoothed loss."""

    path: Path
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    batches: Batches
    done: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("steps", "tokens", "seconds", "loss"), 0.0))

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        content = {"model": self.model.state_dict(), "optimizers": states, "done": self.done}
        with replacing(self.path) as beside, beside.open("wb") as file:  # whose errors name their cause, unlike torch's
            torch.save({**content, "batches": self.batches.state}, file)

    def load(self) -> None:
        """Put a checkpoint back, but for the peak learning rates, which may be others now."""
        with reading(self.path):
            with ZipFile(self.path) as packed:  # torch writes checksums and does not read them
                if (damaged := packed.testzip()) is not None:
                    raise ValueError(f"{damaged} does not have the checksum that it was written with")
            saved = torch.load(self.path, map_location=next(self.model.parameters()).device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            peaks = [group["peak_lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak_lr"] = peak
        self.batches.load(saved["batches"])
        self.done.update(saved["done"])

    def count(self, loss: float, tokens: int, seconds: float) -> None:
        """Add a step to what was done."""
        done = self.done
        done["loss"] = loss if not done["steps"] else 0.98 * done["loss"] + 0.02 * loss
        done["seconds"] += seconds
        done["tokens"] += tokens
        done["steps"] += 1


def _step(model: nn.Module, loss: Tensor, optimizers: list[torch.optim.Optimizer], factor: float, clip: float) -> float:
    """Follow a loss's gradient once; return the loss.  One that is not finite is not followed."""
    value = loss.item()
    if not math.isfinite(value):
        return value
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip, error_if_nonfinite=True)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad()
    return value
