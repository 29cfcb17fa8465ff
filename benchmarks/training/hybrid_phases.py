"""Two phases of training of a hybrid's mixers against the model that it was converted from: each layer, then logits."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TextColumn, track
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.training.hybrid import mixers_module, mixers_of, use_training_forward
from stree.distill.settings import Settings
from stree.distill.text import Batches
from stree.distill.training import distill_loss, probs_of, schedule, text_loss
from stree.files import replacing

Backward = Callable[["Run", Tensor], Tensor]  # of windows: adds the gradient of a loss to the mixers', returns the loss

FIGURES = ("seconds", "steps", "tokens", "first_loss", "loss")  # of a phase; the last one is smoothed
SAVE_EVERY = 240.0  # seconds between checkpoints
READ_EVERY = {"cpu": 1, "cuda": 16}  # steps after which loss and clock are read
WARMUP, DECAY, CLIP = 0.05, 0.6, 1.0
RIDGE = 1e-2  # of the mean of the squared features


@dataclass(slots=True)
class Run:
    """Teacher, student, text and what was done; both models are on the device on which they are trained.

    Attributes:
        path: of the checkpoint.
        teacher: the source, in float32.
        student: the hybrid; only its mixers are trained.
        batches: source of windows.
        batch: windows of a step.
        dtype: of matmuls.
        compile: whether torch.compile is used on the mixers.
        record: ``phases``, name -> `FIGURES`; ``perplexity``, name of a moment -> kind of text -> perplexity.
    """

    path: Path
    teacher: PreTrainedModel
    student: PreTrainedModel
    batches: Batches
    batch: int
    dtype: torch.dtype
    compile: bool = False
    record: dict[str, dict[str, Any]] = field(default_factory=lambda: {"phases": {}, "perplexity": {}})
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        """Freeze everything but the mixers, and replace their forward by the training one."""
        self.teacher.eval().requires_grad_(False)
        self.student.eval().requires_grad_(False)
        self.mixers.requires_grad_(True)
        compiler = partial(torch.compile, dynamic=False) if self.compile else (lambda function: function)
        use_training_forward(self.student, self.dtype, compiler)
        self.renew_optimizer()

    def autocast(self) -> torch.autocast:
        """Matmuls outside of the mixers in ``dtype``."""
        return torch.autocast(self.student.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def mixers(self) -> nn.ModuleDict:
        """What is trained."""
        return mixers_module(self.student)

    def renew_optimizer(self) -> None:
        """Begin with an optimiser that has seen no gradient."""
        self.optimizer = torch.optim.AdamW(self.mixers.parameters(), betas=(0.9, 0.95), weight_decay=0.0)

    def train(self, name: str, backward: Backward, lr: float, seconds: float) -> None:
        """Run a phase, or what a resumed run left of it, with checkpoints.

        Args:
            name: of the phase in ``record``.
            backward: adds the gradient of a loss to the mixers' and returns the loss, without reading the device.
            lr: peak learning rate.
            seconds: of the phase, those before a resumption included.

        Raises:
            RuntimeError: the loss is no longer finite.
        """
        done = self.record["phases"].setdefault(name, dict.fromkeys(FIGURES, 0))
        if not done["steps"]:
            self.renew_optimizer()
        last = last_save = time.monotonic()
        columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=seconds, completed=done["seconds"], loss=done["loss"])
            while done["seconds"] < seconds:
                steps = READ_EVERY[self.student.device.type]
                loss = self._steps(steps, backward, lr * schedule(done["seconds"] / seconds, WARMUP, DECAY)).item()
                if not math.isfinite(loss):
                    raise RuntimeError(f"{name}: the loss is {loss} at step {done['steps']}; lower the learning rate")
                now = time.monotonic()
                self._count(done, loss, steps, now - last)
                last = now
                bar.update(task, completed=min(done["seconds"], seconds), loss=done["loss"])
                if now - last_save >= SAVE_EVERY:
                    self.save()
                    last_save = now

    def _count(self, done: dict[str, float], loss: float, steps: int, seconds: float) -> None:
        """Add steps to the figures of a phase."""
        if not done["steps"]:
            done["first_loss"] = done["loss"] = loss
        done["loss"] = 0.95 * done["loss"] + 0.05 * loss
        done["seconds"] += seconds
        done["steps"] += steps
        done["tokens"] += steps * self.batch * self.batches.length

    def _steps(self, count: int, backward: Backward, lr: float) -> Tensor:
        """Take optimiser steps; return the last loss, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for windows in self.batches.next(count * self.batch).to(self.student.device).split(self.batch):
            loss = backward(self, windows)
            torch.nn.utils.clip_grad_norm_(self.mixers.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        content = {"mixers": self.mixers.state_dict(), "optimizer": self.optimizer.state_dict(), "record": self.record}
        with replacing(self.path) as beside:
            torch.save({**content, "batches": self.batches.state}, beside)

    def load(self) -> None:
        """Put the checkpoint back."""
        saved = torch.load(self.path, map_location=self.student.device, weights_only=True)
        self.mixers.load_state_dict(saved["mixers"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.batches.load(saved["batches"])
        self.record.update(saved["record"])


@contextmanager
def attention_recorded(teacher: PreTrainedModel, layers: Iterable[int]) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Record the input and the output of attention modules, each float[batch, length, hidden], by layer."""
    record: dict[int, tuple[Tensor, Tensor]] = {}

    def hook(index: int, _: Any, __: tuple, inputs: dict[str, Any], outputs: tuple) -> None:
        record[index] = inputs["hidden_states"], outputs[0].float()

    modules = cast(Any, teacher.base_model).layers
    handles = [modules[i].self_attn.register_forward_hook(partial(hook, i), with_kwargs=True) for i in layers]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_pairs(run: Run, windows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Inputs and outputs of the teacher's attention at the layers that the student replaces."""
    with attention_recorded(run.teacher, mixers_of(run.student)) as record, run.autocast():
        run.teacher.base_model(windows[:, :-1], use_cache=False)
    return record


@torch.no_grad()
def fit_outputs(run: Run, windows: int) -> None:
    """Set every mixer's output projection by ridge regression of the attention's outputs on what it projects."""
    mixers = mixers_of(run.student)
    sums: dict[int, Any] = dict.fromkeys(mixers, 0.0)
    for mixer in mixers.values():
        mixer.out_proj.weight.copy_(torch.eye(mixer.intermediate_size))  # the mixer then returns what it projects
    for _ in track(range(0, windows, run.batch), "least squares", console=Console(stderr=True)):
        for index, (given, wanted) in attention_pairs(run, run.batches.next(run.batch).to(run.student.device)).items():
            features = F.pad(mixers[index](hidden_states=given), (0, 1), value=1.0).flatten(0, 1)
            sums[index] += features.T @ torch.cat([features, wanted.flatten(0, 1)], dim=-1)
    for index, mixer in mixers.items():
        inner = mixer.intermediate_size
        gram, product = sums[index].double().split([inner + 1, mixer.hidden_size], dim=-1)
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(inner + 1, device=gram.device, dtype=gram.dtype)
        solution = torch.linalg.solve(gram + ridge, product).T
        mixer.out_proj.weight.copy_(solution[:, :inner])
        mixer.out_proj.bias.copy_(solution[:, inner])


def match_attention(run: Run, windows: Tensor) -> Tensor:
    """Mean over mixers of the squared error of the attention's output, over its variance."""
    mixers = mixers_of(run.student)
    total = torch.zeros((), device=windows.device)
    for index, (given, wanted) in attention_pairs(run, windows).items():
        loss = (mixers[index](hidden_states=given) - wanted).square().mean() / wanted.var()
        loss.backward()
        total += loss.detach()
    return total / len(mixers)


def match_logits(run: Run, windows: Tensor) -> Tensor:
    """KL divergence in nats from the teacher's next-token distribution to the student's."""
    with run.autocast():
        loss = distill_loss(probs_of(run.teacher, run.dtype), Settings(dtype=run.dtype))(run.student, windows)
    loss.backward()
    return loss.detach()


@torch.no_grad()
def perplexity(run: Run, model: PreTrainedModel, measured: Mapping[str, Tensor]) -> dict[str, float]:
    """Perplexity of windows int64[count, length + 1] by kind, and of all tokens."""
    loss_fn, sums = text_loss(Settings(dtype=run.dtype)), {}
    for kind, windows in track(measured.items(), "perplexity", console=Console(stderr=True)):
        with run.autocast():
            parts = [loss_fn(model, part.to(model.device)) * len(part) for part in windows.split(run.batch)]
        sums[kind] = float(torch.stack(parts).sum())
    mean = sum(sums.values()) / sum(map(len, measured.values()))
    return {**{kind: math.exp(total / len(measured[kind])) for kind, total in sums.items()}, "all": math.exp(mean)}
