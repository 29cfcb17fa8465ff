"""`check_family`: a patched model scores trees and keeps its state as forwards of whole texts say."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stree.checks import integer
from stree.models.tree_lm import TreeLM
from stree.testing.forwards import (
    as_commit,
    extended,
    fresh_logits,
    path_to,
    random_tree,
    real_nodes,
    relative_error,
    right_padded,
    tree_error,
)
from stree.testing.report import CheckFailed, Report
from stree.tree import TokenTree

__all__ = ["check_family"]

BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-7}  # of the largest logit
LENGTHS, MAX_LENGTH, MAX_NODES = (9, 1, 5), 64, 12
Step = tuple[str, float]  # what was compared, and the relative error


def check_family(model: Any, *, seed: int = 0) -> Report:
    """Check that trees on a model give the logits of its own forwards, in every way in which decoding uses it.

    A copy is patched; the model itself stays as it is and runs whole texts without a cache, a text for every node.
    Compared are prompts of different lengths in one batch, trees with padding, trees after commits of some rows, a tree
    scored in pieces, further tokens of a prompt, rows that are selected and cloned, and the plain model that
    ``release`` returns.

    Args:
        model: a transformers model of the family, or a TreeLM, small, on a CPU, in float32 or float64.  Its config
            mixes all kinds of layers.  With weights of the usual initialisation a state is forgotten within a few
            tokens, which hides errors: multiply matrices by three or so.
        seed: of texts and trees.

    Raises:
        CheckFailed: some logits differ; the message lists every comparison.
        TypeError: no model.
        NotImplementedError: the family has no row in the table of families, or a layer is none that is known.
        ValueError: a model of another dtype or device, or in training mode.
    """
    if isinstance(model, TreeLM):
        model = copy.deepcopy(model).release()
    seed = integer("seed", seed)
    weight = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    if weight is None:
        raise TypeError(f"model must be a transformers model or a TreeLM of one, got {type(model).__name__}")
    if weight.dtype not in BOUNDS or weight.device.type != "cpu" or model.training:
        found = f"{weight.dtype} on {weight.device}{', in training mode' * model.training}"
        raise ValueError(f"the check takes a model in eval mode on a CPU in float32 or float64, got {found}")
    steps, problem = list[Step](), ""
    name, bound = f"family {model.config.model_type}", BOUNDS[weight.dtype]
    lm = TreeLM(copy.deepcopy(model))
    try:
        for step in _Texts(model, lm, random.Random(seed)).steps():
            steps.append(step)  # one by one: those before a failure are kept
    except NotImplementedError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        problem = f"\nthen: {type(error).__name__}: {error}"
    wrong = [what for what, error in steps if not error < bound]
    if wrong or problem:
        lines = [f"  {error:8.1e}  {'WRONG  ' * (not error < bound)}{what}" for what, error in steps]
        raise CheckFailed(f"{name}: relative errors of logits, at most {bound:.0e}:\n" + "\n".join(lines) + problem)
    return Report(name, len(steps), max(error for _, error in steps))


class _Texts:
    """Texts whose state a patched model holds.

    Args:
        model: the oracle.
        lm: a patched copy of it.
        rng: draws texts and trees.
    """

    def __init__(self, model: Any, lm: TreeLM, rng: random.Random) -> None:
        self.model, self.lm, self.rng = model, lm, rng
        self.texts = [self._tokens(length) for length in LENGTHS]
        self.state = lm.new_state(len(LENGTHS), MAX_LENGTH, MAX_NODES)

    def steps(self) -> Iterator[Step]:
        """Decode; yield what was compared."""
        logits = self.lm.prefill(self.state, *right_padded(self.texts))
        yield f"logits after prompts of {LENGTHS} tokens in one batch", self._ends(logits)
        yield "a tree of 8, 3 and 12 nodes, with padding", self._step([8, 3, 12], (0, 1, 2))
        yield "a tree after the commit of a path in every row", self._step([5, 12, 7], (0, 2))
        yield "a tree after a commit that leaves one row as it was", self._step([12, 4, 6], (0, 1))
        tree = self._tree([9, 9, 9])
        ends = (4, 6, 9)
        parts = [TokenTree(tree.tokens[:, :end], tree.parents[:, :end]) for end in ends]
        pieces = [self.lm.verify(self.state, part, first=first) for part, first in zip(parts, (0, *ends), strict=False)]
        yield "a tree scored in three pieces", tree_error(self.model, self.texts, tree, torch.cat(pieces, 1))
        self._commit(tree, (1,))
        more = [self._tokens(count) for count in (3, 1, 2)]
        logits = self.lm.extend(self.state, *right_padded(more))
        self.texts = [[*text, *tokens] for text, tokens in zip(self.texts, more, strict=True)]
        yield "logits after 3, 1 and 2 further tokens", self._ends(logits)
        yield from self._rows()
        text = torch.tensor([self.texts[0]])
        with torch.no_grad():
            plain = self.lm.release()(text, use_cache=False).logits[0]
        yield "the released model's own forward", relative_error(plain, fresh_logits(self.model, self.texts[0]))

    def _rows(self) -> Iterator[Step]:
        """Select and clone rows."""
        whole, texts = self.state, self.texts
        self.state, self.texts = whole.select(torch.tensor([2, 0])), [texts[2], texts[0]]
        yield "a tree on two selected rows", self._step([6, 12], (0, 1))
        self.state, self.texts = whole.clone(), texts
        yield "a tree on a clone", self._step([4, 4, 4], (0, 1, 2))
        self.state, self.texts = whole, texts
        yield "a tree on the state that was selected from and cloned", self._step([5, 1, 12], ())

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.lm.vocab_size) for _ in range(count)]

    def _tree(self, sizes: Sequence[int]) -> TokenTree:
        return random_tree(self.rng, self.lm.vocab_size, sizes)

    def _ends(self, logits: Tensor) -> float:
        """Error of the logits after all texts."""
        pairs = zip(logits, self.texts, strict=True)
        return max(relative_error(one, fresh_logits(self.model, text)[-1]) for one, text in pairs)

    def _step(self, sizes: Sequence[int], rows: Sequence[int]) -> float:
        """Error of a random tree's logits; then a path is committed in some rows."""
        tree = self._tree(sizes)
        error = tree_error(self.model, self.texts, tree, self.lm.verify(self.state, tree))
        self._commit(tree, rows)
        return error

    def _commit(self, tree: TokenTree, rows: Sequence[int]) -> None:
        ends = [self.rng.choice(real_nodes(tree, row)) for row in range(len(self.texts))]
        paths = [path_to(tree, row, end) if row in rows else [] for row, end in enumerate(ends)]
        if any(paths):
            self.lm.commit(self.state, *as_commit(paths))
            self.texts = extended(self.texts, tree, paths)
