"""Fit the decision model of ``DecisionStop`` to a pair: logistic regression on what the draft knows of a node.

Run: python benchmarks/fit_decision.py --suites humaneval=FILE,gsm8k=FILE

Every prompt is continued with a fixed tree at each temperature; a run node is an example, and whether it and one of
its children were accepted is its label.  The first tenth of the prompts is held out.  Prints one JSON line: weights,
examples, and the held-out log-loss beside that of the share of accepted nodes alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stree.bench.pair import Pair
from stree.bench.prompts import parse_suites, read_suite
from stree.drafters import ModelDrafter
from stree.growth import Estimate, Static
from stree.growth.decision import NUM_PROBS, features
from stree.growth.plan import Wrapped
from stree.growth.stops import Stopped
from stree.sampling import Random, Sampling
from stree.verify import Acceptance, accept

SHAPE = (3, 2, 1, 1, 1, 1)
BUDGET = 34


@dataclass(eq=False)
class Log:
    """A rule that never stops and remembers what it saw of a step."""

    seen: list[Tensor] = field(default_factory=list)

    def goes_on(self, depth: int, values: Tensor) -> None:
        """Say nothing."""

    def draws(self, reach: Tensor, law: Tensor) -> None:
        """Remember."""
        self.seen.append(features(reach, law))


@dataclass(frozen=True)
class Logged(Wrapped):
    """A growth that is watched by a log."""

    log: Log = field(default_factory=Log)

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Begin the other's estimate with the log beside it."""
        return Stopped(self.base.estimate(batch, device), self.log)


def examples(pair: Pair, prompt: list[int], sampling: Sampling, steps: int) -> tuple[Tensor, Tensor]:
    """Continue a prompt; give float32[examples, 11] features and float32[examples] labels."""
    assert pair.drafter is not None, "a decision model is fitted to a draft model"
    state = pair.target.new_state(1, len(prompt) + steps * len(SHAPE) + BUDGET, BUDGET)
    pending = pair.target.prefill(state, torch.tensor([prompt])).argmax(-1)
    rng = Random(0, torch.zeros(1, dtype=torch.long), state.lengths.long())
    run = ModelDrafter(pair.drafter).start(pair.target.vocab_size, [prompt], rng)
    growth = Logged(Static(SHAPE).bind(sampling))
    rows, labels = [], []
    for _ in range(steps):
        growth.log.seen.clear()
        draft = run.propose(pending, growth, BUDGET)
        logits = pair.target.verify(state, draft.tree)
        accepted = accept(draft.tree, logits, sampling, rng.at(state.lengths.long()), draft.laws)
        pair.target.commit(state, accepted.path, accepted.path_lengths)
        run.observe(accepted)
        pending = accepted.next_token
        seen = torch.cat(growth.log.seen, 1)[0]
        is_live = seen[:, NUM_PROBS] > 0
        rows.append(seen[is_live])
        labels.append(has_accepted_child(accepted, len(seen))[is_live])
    return torch.cat(rows), torch.cat(labels)


def has_accepted_child(accepted: Acceptance, num_nodes: int) -> Tensor:
    """Mark the nodes of the accepted path but its last: float32[num_nodes]."""
    inner = accepted.path[0, : int(accepted.path_lengths[0]) - 1].long()
    return torch.zeros(num_nodes).index_fill_(0, inner, 1.0)


def fit(rows: Tensor, labels: Tensor) -> Tensor:
    """Fit a logistic regression with a little ridge: float32[12], weights and bias."""
    weights = torch.zeros(rows.shape[1] + 1, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = log_loss(weights, rows, labels) + 1e-4 * weights[:-1].square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return weights.detach()


def log_loss(weights: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """Give the mean negative log-likelihood, nats."""
    odds = rows @ weights[:-1] + weights[-1]
    return torch.nn.functional.binary_cross_entropy_with_logits(odds, labels)


def main() -> None:
    """Collect, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", required=True, help="prompt files, as for stree bench run")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--prompts", type=int, default=20, help="of each suite")
    parser.add_argument("--steps", type=int, default=12, help="of each prompt and temperature")
    parser.add_argument("--temperatures", default="0,0.8")
    arguments = parser.parse_args()
    pair = Pair.load(arguments.target, arguments.drafter)
    temperatures = [float(text) for text in arguments.temperatures.split(",")]
    prompts = [
        pair.encode(prompt.turns[:1])[-512:]
        for name, path in parse_suites(arguments.suites).items()
        for prompt in read_suite(name, path, arguments.prompts)
    ]
    parts = [
        [examples(pair, prompt, Sampling(temperature), arguments.steps) for temperature in temperatures]
        for prompt in prompts
    ]
    held = max(1, len(parts) // 10)
    sets = [
        [torch.cat(tensors) for tensors in zip(*(pair for part in some for pair in part), strict=True)]
        for some in (parts[held:], parts[:held])
    ]
    weights = fit(*sets[0])
    share = sets[0][1].mean().logit().expand(1)
    base = log_loss(torch.cat([torch.zeros(NUM_PROBS + 1), share]), *sets[1])
    report = {
        "weights": [round(float(weight), 2) for weight in weights],
        "examples": [len(labels) for _, labels in sets],
        "held_out_log_loss": round(float(log_loss(weights, *sets[1])), 4),
        "held_out_log_loss_of_share": round(float(base), 4),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
