"""Train the decision model of improved MCSD (arXiv 2409.10644) for a pair, and compare it with a logistic regression.

Run: python -m benchmarks.studies.decision --suite NAME=FILE,... --weights FILE

Trees of fixed widths are drafted and verified.  A node's label is whether one of its children was accepted, its inputs
are those of ``DecisionStop``: the ten greatest draft probabilities and its value.  The first prompts of each suite are
held out.  ``DecisionStop(base, weights=...)`` takes either model of the file of weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as log_loss

import stree
from benchmarks.report import study
from stree.bench.pair import Pair
from stree.bench.plan import read_suites
from stree.bench.prompts import parse_suites
from stree.growth import Static, Stop, Stopped
from stree.growth.mcsd import features

__all__ = ["collect", "fit", "weights_of"]

WIDTHS = [3, 2, 1, 1]
TITLES = ("model", "log-loss, training", "log-loss, held out")
INPUTS = 11
MODELS = {"regression": (), "network": (44,)}  # hidden layers; the second is the paper's
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Recorder(Stop):
    """Never stops, and keeps the inputs of every layer of one text: float32[above, 11]."""

    layers: list[Tensor] = field(default_factory=list, hash=False, compare=False)

    def draws(self, values: Tensor, dist: Tensor) -> None:
        """Keep the inputs."""
        self.layers.append(features(values, dist)[0])


def collect(lm: stree.TreeLM, drafter: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[Tensor, Tensor]:
    """Draft and verify; return the inputs of all nodes that were run, float32[nodes, 11], and their labels, 0 or 1."""
    inputs, labels = list[Tensor](), list[float]()
    for temperature in TEMPERATURES:
        for prompt in prompts:
            recorder = Recorder()
            out = stree.generate(
                lm, [prompt], drafter, growth=Stopped(Static(WIDTHS), recorder), budget=64, ignore_eos=True,
                sampling=stree.Sampling(temperature), max_new_tokens=new_tokens, return_steps=True,
            )  # fmt: skip
            assert out.steps is not None, "they were asked for"
            every = iter(recorder.layers)
            for step in out.steps[0]:
                run = torch.cat([next(every) for _ in WIDTHS])
                right = {int(above) for above in list(step.path)[:-1]}
                inputs.append(run)
                labels += [float(node in right) for node in range(len(run))]
    return torch.cat(inputs), torch.tensor(labels)


def fit(hidden: Sequence[int], inputs: Tensor, labels: Tensor, epochs: int = 60, seed: int = 0) -> nn.Sequential:
    """Train linear layers of these hidden sizes, ReLU between them, by log-loss."""
    torch.manual_seed(seed)
    sizes, parts = [INPUTS, *hidden, 1], list[nn.Module]()
    for before, after in zip(sizes, sizes[1:], strict=False):
        parts += [nn.Linear(before, after), nn.ReLU()]
    model, peak = nn.Sequential(*parts[:-1]), 5e-3 if hidden else 3e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(256):
            optimizer.zero_grad()
            log_loss(model(inputs[rows]).squeeze(-1), labels[rows]).backward()
            optimizer.step()
        schedule.step()
    return model


def weights_of(model: nn.Sequential) -> list[list[list[float]]]:
    """Return layers as ``DecisionStop`` takes them: rows of weights, the bias last."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [torch.cat([layer.weight, layer.bias[:, None]], 1).tolist() for layer in layers]


def measure(
    suite: str, weights: Path, held_out: int = 4, limit: int = 12, new_tokens: int = 32
) -> list[dict[str, Any]]:
    """Train both models, write their weights, and return one record.

    Args:
        suite: NAME=FILE, separated by commas.
        weights: JSON file of the weights.
        held_out: prompts of each suite, its first.
        limit: prompts of each suite, those held out among them.
        new_tokens: of each prompt.
    """
    pair, prompts = Pair.load(device="cpu"), {"held out": list[Any](), "training": list[Any]()}
    for one in read_suites(parse_suites(suite), limit):
        for prompt in one.prompts:
            kind = "held out" if prompt.index < held_out else "training"
            prompts[kind].append(pair.encode(prompt.turns[:1]))
    assert pair.drafter is not None, "the bundled pair has one"
    drafter = stree.drafters.ModelDrafter(pair.drafter)
    nodes = {kind: collect(pair.target, drafter, texts, new_tokens) for kind, texts in prompts.items()}
    rows, layers = list[dict[str, Any]](), dict[str, Any]()
    for name, hidden in MODELS.items():
        model = fit(hidden, *nodes["training"])
        layers[name], rows = weights_of(model), [*rows, {"model": name}]
        for kind, (inputs, labels) in nodes.items():
            with torch.no_grad():
                rows[-1][kind] = round(log_loss(model(inputs).squeeze(-1), labels).item(), 4)
    weights.write_text(json.dumps(layers), encoding="utf-8")
    params = {"nodes": {kind: len(labels) for kind, (_, labels) in nodes.items()}, "new_tokens": new_tokens}
    return [{"bench": "decision", "params": params, "rows": rows}]


if __name__ == "__main__":
    study(measure, TITLES, lambda row: [row["model"], row["training"], row["held out"]])
