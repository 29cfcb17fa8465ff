"""What can be chosen about making a drafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch

from stree.checks import check_numbers, check_one_of, check_sizes
from stree.distill.network import CHUNK

__all__ = ["KINDS", "RECIPES", "Settings"]

KINDS = ("model", "mtp", "eagle3", "dflash", "specblock", "diffusion")
RECIPES = dict.fromkeys(("mtp", "eagle3"), ("plain", "hass", "griffin", "fspad"))  # the other kinds: plain

# Numbers -> whether a value is one that they may have, and its range in words.
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("minutes", "muon_lr", "adam_lr", "clip"), (lambda x: 0 < x < math.inf, "finite and above 0")),
    **dict.fromkeys(("text_share", "generated"), (lambda x: 0 <= x < 1, "in [0, 1)")),
    **dict.fromkeys(("temperature", "save_every"), (lambda x: 0 <= x < math.inf, "finite and not negative")),
    "warmup": (lambda x: 0 <= x <= 1, "in [0, 1]"), "decay": (lambda x: 0 < x <= 1, "in (0, 1]"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """How a drafter is made; the defaults are the bundled drafter's recipe.

    Attributes:
        kind: "model", a small Mamba-2, or a head that reads the target's hidden states: "mtp" and "eagle3", one
            attention layer, "dflash", which drafts a block of 8 positions in one call, or "specblock", whose blocks of
            4 hang below each other; or "diffusion", a masked-diffusion model of half the target's width that reads
            tokens alone and drafts a window of 8.
        recipe: of a causal head's training: "plain", or that of a paper, "hass", "griffin" or "fspad".
        hidden: width of a model, a multiple of 16; None for half the target's.  A head has the target's.
        layers: Mamba-2 layers of a model.
        minutes: of training, target-generated text included; measuring comes on top.
        steps: optimiser steps instead of minutes; the result then depends on nothing but text, settings and machine.
        text_share: share of a model's training on text alone, by cross entropy, before the target's distributions are
            learnt; a head learns them from the beginning.
        generated: share of the windows of the second part that the target wrote itself; 0 for none.
        temperature: at which it writes.
        batch_size: windows a step.
        length: tokens of a window, a multiple of 64 or less.
        muon_lr: peak learning rate of the matrices.
        adam_lr: peak learning rate of the embedding and all vectors.
        warmup: share of a part in which the rates rise.
        decay: share of a part in which they fall to zero.
        clip: largest norm of a gradient.
        dtype: of matmuls, None for bfloat16 on a GPU and float32 on a CPU; decays, norms, losses and weights stay in
            float32.
        compile: whether torch.compile is used; faster after its minutes of compiling.
        save_every: seconds between checkpoints.
        seed: of weights, windows and generated text.

    Raises:
        TypeError: a count that is no integer.
        ValueError: one outside its range.
    """

    kind: str = "model"
    recipe: str = "plain"
    hidden: int | None = None
    layers: int = 2
    minutes: float = 20.0
    steps: int | None = None
    text_share: float = 0.45
    generated: float = 0.5
    temperature: float = 1.0
    batch_size: int = 4
    length: int = 512
    muon_lr: float = 8e-3
    adam_lr: float = 6e-3
    warmup: float = 0.01
    decay: float = 0.6
    clip: float = 1.0
    dtype: torch.dtype | None = None
    compile: bool = False
    save_every: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every value."""
        check_sizes(
            layers=self.layers, batch_size=self.batch_size, steps=self.steps, hidden=self.hidden, length=self.length
        )
        check_one_of("kind", self.kind, KINDS)
        check_one_of(f"recipe of kind {self.kind}", self.recipe, RECIPES.get(self.kind, ("plain",)))
        check_numbers(**{name: getattr(self, name) for name in RANGES})
        if self.hidden is not None and self.hidden % 16:
            raise ValueError(f"hidden must be a multiple of 16, got {self.hidden}")
        if self.length < 8 or (self.length > CHUNK and self.length % CHUNK):
            raise ValueError(f"length must be a multiple of {CHUNK}, or in [8, {CHUNK}], got {self.length}")
        if self.kind == "diffusion" and self.length < 16:
            raise ValueError(f"length must be at least 16 for windows of kind diffusion, got {self.length}")
        for name, (is_within, words) in RANGES.items():
            if not is_within(getattr(self, name)):
                raise ValueError(f"{name} must be {words}, got {getattr(self, name)}")
        if not isinstance(self.seed, Integral):
            raise TypeError(f"seed must be an integer, got {type(self.seed).__name__}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in [0, 2**31), got {self.seed}")
        if self.dtype not in (None, torch.bfloat16, torch.float32):
            raise ValueError(f"dtype must be bfloat16 or float32 (float16 overflows in training), got {self.dtype}")
