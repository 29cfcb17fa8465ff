"""Tokens a step of lookahead decoding (arXiv 2402.02057), which has no draft model.

Run: python -m benchmarks.studies.lookahead --suite NAME=FILE,...

A step verifies one tree: below the text's last token the window branch, N - 1 rows of W guessed tokens, and up to G
n-grams of the pool that begin with that token.  The predictions at the end of the window branch make new n-grams and
the next row.  Tokens are drawn from the target and looked for in the tree, so the text is that of plain decoding.
Choices: the first rows are drawn from the prompt, and the pool begins empty.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import stree
from benchmarks.report import study
from stree.bench.pair import Pair
from stree.bench.plan import read_suites
from stree.bench.prompts import parse_suites
from stree.bench.summary import sum_ratio
from stree.bench.tables import ratio_text
from stree.tree import TokenTree

__all__ = ["TITLES", "Shape", "cells", "chooser", "decode"]

TITLES = ("W, N, G", "nodes a step", "tau, T 0", "tau, T 0.8")
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the window and of the pool.

    Attributes:
        window: W, tokens of a row of the window branch.
        ngram: N, tokens of an n-gram; the window branch has N - 1 rows.
        most: G, n-grams of the pool that a step verifies, the newest of those that begin with the last token.
    """

    window: int
    ngram: int
    most: int


def decode(
    lm: stree.TreeLM, prompt: Sequence[int], new_tokens: int, shape: Shape, choose: Callable[[Tensor], int]
) -> tuple[list[int], int, int]:
    """Decode a text; ``choose`` draws a token from float[vocab] logits.

    Returns:
        New tokens, the steps that made them and the nodes of all steps.
    """
    most_nodes = 1 + (shape.window + shape.most) * (shape.ngram - 1)
    state = lm.new_state(1, len(prompt) + new_tokens + 2 * most_nodes, most_nodes)
    text = [choose(lm.prefill(state, torch.tensor([list(prompt)]))[0])]
    draws, steps, num_nodes = random.Random(0), 0, 0
    rows = [[draws.choice(prompt) for _ in range(shape.window)] for _ in range(shape.ngram - 1)]
    pool: dict[int, dict[tuple[int, ...], None]] = defaultdict(dict)  # first token -> what follows, the newest last
    while len(text) <= new_tokens:
        tokens, parents, children = [text[-1]], [-1], dict[tuple[int, int], int]()

        def append(path: Sequence[int], tokens: Any = tokens, parents: Any = parents, children: Any = children) -> int:
            """Append what the tree does not have of a path below the root; return its last node."""
            node = 0
            for token in path:
                key = (node, token)
                node = children.setdefault(key, len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(key[0])
            return node

        columns = list(zip(*rows, strict=True))
        ends = [append([*rows[0][:place], *column]) for place, column in enumerate(columns)]
        for path in list(pool[text[-1]])[-shape.most :]:
            append(path)
        tree = TokenTree(torch.tensor([tokens]), torch.tensor([parents], dtype=torch.int32))
        logits = lm.verify(state, tree)[0]
        guessed = logits[ends].argmax(-1).tolist()
        for (first, *rest), last in zip(columns, guessed, strict=True):
            pool[first].pop((*rest, last), None)
            pool[first][*rest, last] = None
        rows = [*rows[1:], guessed]
        accepted, found = [0], choose(logits[0])
        while (child := children.get((accepted[-1], found))) is not None:
            accepted.append(child)
            text.append(found)
            found = choose(logits[child])
        text.append(found)
        lm.commit(state, torch.tensor([accepted], dtype=torch.int32), torch.tensor([len(accepted)], dtype=torch.int32))
        steps, num_nodes = steps + 1, num_nodes + len(tokens)
    return text, steps, num_nodes


def chooser(temperature: float, seed: int) -> Callable[[Tensor], int]:
    """Make the function that draws a token from logits."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        if not temperature:
            return int(logits.argmax())
        return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))

    return choose


def records(
    suite: str, shapes: str = "5,3,5:7,5,7:15,5,15", limit: int = 4, new_tokens: int = 48
) -> list[dict[str, Any]]:
    """Measure all shapes, in one record.

    Args:
        suite: NAME=FILE, separated by commas.
        shapes: W,N,G, separated by colons.
        limit: prompts of each suite.
        new_tokens: of each prompt.
    """
    pair, suites = Pair.load(device="cpu"), read_suites(parse_suites(suite), limit)
    prompts, rows = [pair.encode(one.turns[:1]) for suite in suites for one in suite.prompts], list[dict[str, Any]]()
    for sizes in shapes.split(":"):
        row: dict[str, Any] = {"shape": sizes, "tau": {}}
        for temperature in TEMPERATURES:
            decoded = [
                decode(pair.target, prompt, new_tokens, Shape(*map(int, sizes.split(","))), chooser(temperature, place))
                for place, prompt in enumerate(prompts)
            ]
            tokens, steps = [len(text) - 1 for text, _, _ in decoded], [steps for _, steps, _ in decoded]
            row["tau"][f"{temperature:g}"] = sum_ratio(tokens, steps)
            row["nodes"] = round(sum(nodes for _, _, nodes in decoded) / sum(steps), 1)
        rows.append(row)
        print(*cells(row), sep=" | ", flush=True)
    params = {"limit": limit, "new_tokens": new_tokens, "suites": [one.name for one in suites]}
    return [{"bench": "lookahead", "params": params, "rows": rows}]


def cells(row: dict[str, Any]) -> list[str]:
    """Write a row of the table under ``TITLES``."""
    return [row["shape"], str(row["nodes"]), *map(ratio_text, row["tau"].values())]


if __name__ == "__main__":
    study(records, TITLES, cells)
