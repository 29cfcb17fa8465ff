"""Which growth, verifier and drafter emit most tokens a step: expected tau at equal nodes and equal draft calls.

Texts are drawn once from the target alone.  At every ``--stride``-th token of each, every method drafts a tree below
the same pending token, and the number of tokens that its step emits is computed exactly over the verifier's random
numbers (``expectation.expected_path``); all growths draw from one random tree a context.  So figures are paired over
contexts, and far less noisy than tau of sampled runs.  What this is not: contexts lie evenly along the target's text,
where a real step begins behind the last step's end, so ``measured`` rows run the real loop on the same prompts.

A growth that learns (Calibrated) has one run a text, as in production, and learns at every context from the log of an
acceptance there; the text goes on as it is, by the stride, which is about what a step emits.

    python -m benchmarks.studies.who_wins --suite humaneval=HumanEval.jsonl,gsm8k=test.jsonl,mt_bench=question.jsonl

An interrupted run goes on with the same command: finished batches of prompts are kept.  Without ``--suite`` it prints
the tables of ``--out``; ``--write`` puts them into its README.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stree
from benchmarks.studies import who_wins_report
from benchmarks.studies.expectation import expected_path
from benchmarks.studies.methods import Method, methods
from benchmarks.studies.replay import Coupled, Replay, Walked
from stree.bench.directory import RunDirectory
from stree.bench.pair import Pair
from stree.bench.prompts import parse_suites, read_suite
from stree.bench.records import ROOT, Record, environment
from stree.drafters import Draft, Drafter, DraftRun, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.files import alone_in
from stree.growth import Calibrated, Chain, Growth
from stree.sampling import Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance, DraftProbs

# Prompts of every suite that the default was fitted to (33-48) or chosen on (81-112): nothing is measured on them.
FITTED = (*range(32, 48), *range(80, 112))


class Block:
    """A batch of prompts at one temperature: the texts, the models on them, and a run of every method.

    Args:
        pair: target and drafter.
        prompts: token lists.
        numbers: which prompts they are, for the random numbers.
        temperature: of target and draft.
        options: ``new_tokens``, ``stride`` and ``seed`` are read.
        kinds: the methods.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: list[list[int]],
        numbers: Sequence[int],
        temperature: float,
        options: argparse.Namespace,
        kinds: Sequence[Method],
    ) -> None:
        assert pair.drafter is not None
        self.sampling, self.stride, self.kinds = Sampling(temperature), options.stride, kinds
        self.num_steps = options.new_tokens // options.stride
        length = self.num_steps * self.stride + 1
        plain = stree.generate(
            pair.target, prompts, NoDrafter(), budget=1, verifier="match", sampling=self.sampling,
            max_new_tokens=length, seed=options.seed, ignore_eos=True,
        )  # fmt: skip
        self.texts = torch.tensor([row[-length:] for row in plain.sequences])
        self.target, self.draft = (Replay(lm, prompts, length) for lm in (pair.target, pair.drafter))
        sequences = torch.tensor(list(numbers))
        self.rng = Coupled(options.seed + 1, sequences, self.draft.lengths.long(), self.draft)
        self.growths = [kind.growth and kind.growth.bind(self.sampling) for kind in kinds]
        vocab = pair.target.vocab_size
        self.runs = [self.drafter(kind.drafter).start(vocab, prompts, self.rng) for kind in kinds]
        self.sums: dict[str, Tensor] = {}  # float64[prompts, 3]: tau, nodes, draft calls

    def drafter(self, kind: str) -> Drafter:
        """Make a drafter on the replayed texts."""
        model: Any = ModelDrafter(self.draft)  # type: ignore[arg-type]
        suffix: Any = Walked(SuffixDrafter(), self.texts, self.stride)
        return {"model": model, "suffix": suffix}.get(kind) or FusedDrafter(model, suffix)

    def run(self) -> dict[str, Tensor]:
        """Compare all methods on every context; mean tau, nodes and draft calls by method, float64[prompts, 3]."""
        for step in range(self.num_steps):
            begin = step * self.stride
            for kind, growth, run in zip(self.kinds, self.growths, self.runs, strict=True):
                self._step(kind, growth, run, self.texts[:, begin], self.texts[:, begin + 1])
                read_on(run, self.texts[:, begin + 1 : begin + self.stride])
            for model in (self.target, self.draft):
                model.move(self.texts[:, begin : begin + self.stride])
        return {name: sums / self.num_steps for name, sums in self.sums.items()}

    def _step(self, kind: Method, growth: Growth | None, run: DraftRun, pending: Tensor, following: Tensor) -> None:
        """Draft below int64[batch] tokens of the texts, judge, and let the run learn."""
        draft = run.propose(pending, growth, kind.nodes)
        tree, probs = draft.tree, draft.probs
        logits = self.target.verify(None, tree)
        accepted: list[Acceptance] = []
        for verifier in kind.verifiers[: 1 if self.sampling.is_greedy else None]:
            on_path, acceptance = expected_path(tree, logits, self.sampling, probs, verifier)
            accepted.append(acceptance)
            name = kind.name if verifier == "auto" else f"{kind.name}@{verifier}"
            for depth in kind.cuts:
                if verifier == "auto" and not self.sampling.is_greedy:  # what follows a node changes its own coin
                    cut = cut_chain(draft, depth)
                    on_path, _ = expected_path(cut[0], logits[:, : depth + 1], self.sampling, cut[1], verifier)
                self._add(Method(name, depth + 1, depth, None), 1 + on_path[:, : depth + 1].sum(1), depth + 1.0, depth)
            if not kind.cuts:
                self._add(replace(kind, name=name), 1 + on_path.sum(1), tree.num_nodes.double(), draft.num_calls)
        # The replayed model does not advance, so the run observes an acceptance of the root alone.
        zero, ratios = torch.zeros(len(pending), 1, dtype=torch.int32), accepted[0].ratios
        if ratios is None:  # else the run would learn that every drafted node was rejected
            ratios = right_nodes(tree, logits)
        run.observe(Acceptance(zero, zero[:, 0] + 1, following, ratios))

    def _add(self, kind: Method, tau: Tensor, nodes: Tensor | float, calls: int) -> None:
        """Add one context's figures."""
        each = torch.stack([tau, tau * 0 + nodes, tau * 0 + calls], 1)
        self.sums[kind.key] = self.sums[kind.key] + each if kind.key in self.sums else each


def read_on(run: DraftRun, tokens: Tensor) -> None:
    """Let the acceptance model of a run read int64[batch, m] tokens, the next ones of the texts besides the root."""
    (drafting, *_) = getattr(run, "_runs", [run])
    model = getattr(drafting, "acceptance_model", None)
    if model is not None:
        model.read_text(tokens, None, torch.full((len(tokens),), tokens.shape[1], dtype=torch.int32))


def right_nodes(tree: TokenTree, logits: Tensor) -> Tensor:
    """Mark the nodes that are the most probable token after their parent: float32[batch, n]."""
    likeliest = logits.argmax(-1).gather(1, tree.parents.clamp(min=0).long())
    return (tree.tokens == likeliest).float()


def cut_chain(draft: Draft, depth: int) -> tuple[TokenTree, DraftProbs | None]:
    """Cut a chain at a depth: its first nodes are those of the shorter chain."""
    tree = TokenTree.unchecked(draft.tree.tokens[:, : depth + 1], draft.tree.parents[:, : depth + 1])
    dists = draft.probs
    if dists is None:
        return tree, None
    return tree, DraftProbs(dists.probs, dists.row[:, : depth + 1], dists.kind[:, : depth + 1], dists.max_children)


def measured(pair: Pair, prompts: list[list[int]], temperature: float, options: argparse.Namespace) -> Record:
    """Run the real loop with a few methods: tau of the batch."""
    assert pair.drafter is not None
    found = {}
    for name, nodes, growth in (("calibrated", 16, Calibrated(4)), ("chain", 5, Chain(4)), ("chain", 7, Chain(6))):
        out = stree.generate(
            pair.target, prompts, ModelDrafter(pair.drafter), growth=growth, budget=nodes,
            sampling=Sampling(temperature), max_new_tokens=options.new_tokens, ignore_eos=True, seed=options.seed + 2,
        )  # fmt: skip
        found[f"{name} {nodes}x{growth.depth}"] = round(out.stats["tau"], 4)
    return found


def blocks(options: argparse.Namespace) -> list[tuple[str, float, int]]:
    """Order the work: the first prompts of every row, then the next ones, so that any stop leaves a fair table."""
    batches = range(-(-options.limit // options.batch))
    fair = [batch for batch in batches if not {*FITTED} & {*range(batch * options.batch, (batch + 1) * options.batch)}]
    return [(suite, t, batch) for batch in fair for t in options.temperature for suite in options.suite]


def measure(pair: Pair, directory: RunDirectory, options: argparse.Namespace) -> None:
    """Run what is not finished."""
    known: dict[tuple[str, float, int], set[str]] = {}
    for record in directory.records:
        params = record["params"]
        known.setdefault((params["suite"], params["temperature"], params["batch"]), set()).update(record["tau"])
    prompts = {name: read_suite(name, path, options.limit) for name, path in options.suite.items()}
    for block in blocks(options):
        done = known.get(block, set())
        asked = [kind for kind in methods() if not options.only or kind.name in options.only]
        kinds = [kind for kind in asked if kind.first_key not in done]
        if not kinds:
            continue
        suite, temperature, batch = block
        began = time.process_time()
        chosen = prompts[suite][batch * options.batch : (batch + 1) * options.batch]
        if not chosen:  # a shorter suite
            continue
        tokens = [pair.encode(prompt.turns[:1]) for prompt in chosen]
        indices = [prompt.index for prompt in chosen]
        found = Block(pair, tokens, indices, temperature, options, kinds).run()
        real = {} if done else measured(pair, tokens, temperature, options)
        directory.add([record_of(block, indices, found, real)])
        print(
            f"{suite} T {temperature:g} prompts {indices[0]}-{indices[-1]}: {time.process_time() - began:.0f} s",
            flush=True,
        )


def record_of(block: tuple[str, float, int], numbers: list[int], found: dict[str, Tensor], real: Record) -> Record:
    """Make the record of one batch of prompts."""
    return {
        "bench": "who_wins", "metric": "expected_tokens", "unit": "tokens/step",
        "params": dict(zip(("suite", "temperature", "batch"), block, strict=True)), "prompts": numbers,
        "nodes": {key: round(float(mean[:, 1].mean()), 2) for key, mean in found.items()},
        "calls": {key: round(float(mean[:, 2].mean()), 2) for key, mean in found.items()},
        "tau": {key: [round(tau, 4) for tau in mean[:, 0].tolist()] for key, mean in found.items()},
        "measured": real,
    }  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--suite", type=parse_suites, default={}, help="NAME=FILE,NAME=FILE,...")
    parser.add_argument(
        "--temperature", type=lambda text: [float(t) for t in text.split(",")], default=[0.8, 0.0, 1.0, 0.6]
    )
    parser.add_argument(
        "--limit", type=int, default=16, help="prompts a suite, those that the default was fitted to out"
    )
    parser.add_argument("--batch", type=int, default=8, help="prompts that run side by side")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--stride", type=int, default=4, help="tokens between contexts")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="methods; all if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "who-wins")
    parser.add_argument("--write", action="store_true", help="write them into its README.md")
    options = parser.parse_args(arguments)
    known = {kind.name for kind in methods()}
    if unknown := {*options.only} - known:
        parser.error(f"methods are {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}")
    if options.limit % options.batch:  # a batch that is cut short would count as finished when more are asked for
        parser.error(f"--limit must be a multiple of --batch {options.batch}, got {options.limit}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print tables of what was measured."""
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.suite:
        config = {name: getattr(options, name) for name in ("batch", "new_tokens", "stride", "seed")}
        config |= {"suites": {name: path.name for name, path in options.suite.items()}, "target": "bundled"}
        suites = ",".join(f"{name}={path.name}" for name, path in options.suite.items())
        only = f" --only {','.join(options.only)}" if options.only else ""
        command = f"python -m benchmarks.studies.who_wins --suite {suites}{only}"
        with alone_in(options.out):
            directory = RunDirectory(options.out, config, {**environment(), "command": command})
            directory.keep([])
            measure(Pair.load(), directory, options)
    found = who_wins_report.markdown(options.out)
    if options.write:
        (options.out / "README.md").write_text(found, encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
