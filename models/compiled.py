"""Scoring and commit compiled with torch.compile's backend: on a CPU, a small model's step is mostly operator calls.

The scoring of a tree, and the commit of a path, are traced once with symbolic numbers of nodes and of rows of the
caches, and inductor turns the trace into C++.  Weights and states are inputs of the compiled function, so states of any
size share it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import count, islice
from math import isqrt
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stree.kernels.clock import compile_seconds, compiling
from stree.models.patched_model import PatchedModel
from stree.models.state import DecodeState
from stree.models.tree_step import TreeInputs

if TYPE_CHECKING:
    from stree.models.compiled_files import CompiledFiles
    from stree.models.compiled_function import CompiledFunction

__all__ = ["CompiledSteps"]

logger = logging.getLogger("stree")

Scored = tuple[Tensor, Tensor | None]  # logits, and hidden states where some were asked for
Score = Callable[[DecodeState, TreeInputs, Sequence[int] | None], Scored]
Example = tuple[Callable[..., list[Tensor]], list[Tensor]]  # what is traced, and with which tensors


class CompiledSteps:
    """Scores trees as ``score`` does, and commits paths, by functions compiled when a kind of call first occurs.

    A kind is: commit, or first call or extension of a tree; one node, several or as many as fit; batch size; hidden
    layers.  Where the model's code cannot be compiled for trees of several nodes, that is logged, and all of them are
    scored in torch; where it cannot for trees of one node, likewise all trees.

    Threads may share it.  They read functions without a lock, and one at a time compiles: torch's tracing and inductor
    keep state in globals.

    What another process has compiled for such a model is read from disk.  The first scores of such a function are
    compared with torch's, because a program may have changed the model's code in memory, which no hash sees.

    Args:
        lm: the model.
        score: scores a tree in torch; it reads no values of tensors and writes only to the state's stash.
        layout: what the functions depend on beside their arguments; see ``layout_of``.
        sizes: of the model; the example that is traced has others where a size is symbolic.

    Attributes:
        compile_s: seconds that compiling has taken so far.
    """

    def __init__(self, lm: PatchedModel, score: Score, layout: Hashable, sizes: Collection[int]) -> None:
        self._lm, self._score, self.layout, self._model_sizes = lm, score, layout, frozenset(sizes)
        self._functions: list[CompiledFunction] = []
        self._by_sizes: dict[Hashable, CompiledFunction | None] = {}  # None: not compiled
        self._most_nodes: int | None = None  # of a tree that can be compiled, once a compilation has failed
        self._files: CompiledFiles | None = None
        self.compile_s = 0.0

    def score(self, state: DecodeState, inputs: TreeInputs, hidden_layers: Sequence[int] | None) -> Scored:
        """Score a tree."""
        layers = None if hidden_layers is None else tuple(hidden_layers)
        kind: Any = layers, inputs.positions is None, *inputs.others
        trees = [tensor.contiguous() for tensor in inputs.tensors()]  # strides are compiled in
        tensors = [*trees, state.lengths, *state.layer_tensors]
        sizes = kind, inputs.first, *inputs.tokens.shape, state.max_length, state.max_nodes
        if sizes not in self._by_sizes:
            n = inputs.parents.shape[1]
            is_refused = self._most_nodes is not None and n > self._most_nodes
            example = partial(self._scoring, layers, state, inputs)
            agrees = partial(self._agrees, layers, state, inputs, tensors)
            found = None if is_refused else self._find_or_compile(kind, example, tensors, agrees)
            if found is None and not is_refused:
                self._most_nodes = 0 if n == 1 else 1
            self._by_sizes[sizes] = found
        function = self._by_sizes[sizes]
        if function is None:
            return self._score(state, inputs, hidden_layers)
        logits, *hidden = function(tensors)
        return logits, hidden[0] if hidden else None

    def apply(self, state: DecodeState, path: Tensor, path_lengths: Tensor) -> None:
        """Apply int32[batch, m] paths of the pending tree to every layer and to the lengths of a state."""
        tensors = [path.contiguous(), path_lengths, state.lengths, *state.stack_tensors]
        sizes = "commit", *path.shape, state.max_length, state.max_nodes
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = self._find_or_compile("commit", partial(self._commit, state, path), tensors)
        function = self._by_sizes[sizes]
        if function is None:
            state.apply(path, path_lengths)
        else:
            function(tensors)

    def _find_or_compile(
        self, kind: Hashable, example: Callable[[_Sizes], Example], wanted: Sequence[Tensor],
        agrees: Callable[[CompiledFunction], bool] = lambda _: True,
    ) -> CompiledFunction | None:  # fmt: skip
        """Return a function that takes the ``wanted`` tensors, or None where what is run cannot be compiled.

        One that is on disk is taken if it ``agrees`` with the model.
        """
        with compiling():  # imports inductor, which takes part of a second
            from stree.models.compiled_files import CompiledFiles
            from stree.models.compiled_function import CompiledFunction, compile_lock

        with compile_lock:
            for function in self._functions:
                if function.kind == kind and function.takes(wanted):
                    return function
            symbolic = _Sizes.unlike({size for tensor in wanted for size in tensor.shape} | self._model_sizes)
            began = compile_seconds()
            try:
                with compiling():
                    self._files = self._files or CompiledFiles(self._lm)
                    loaded = self._files.load(kind, wanted)
                    if loaded is not None and agrees(loaded):
                        function = loaded
                    else:
                        run, tensors = example(symbolic)
                        has_one_row = kind != "commit" and tensors[0].numel() == 1
                        function = CompiledFunction.compile(
                            kind, run, tensors, astuple(symbolic), wanted, has_one_row=has_one_row
                        )
                        self._files.save(function)
            except Exception as problem:  # the model's own code may do anything
                what = "commits" if kind == "commit" else "trees"
                nodes = "one node" if wanted[0].shape[1] == 1 else "several nodes"
                name, reason, model = type(problem).__name__, str(problem)[:500], type(self._lm.model).__name__
                told = "%s of %s are run without compilation: %s: %s (%s, whose texts stay the same)"
                logger.warning(told, what, nodes, name, reason, model)
                return None
            finally:
                self.compile_s += compile_seconds() - began
            self._functions.append(function)
            return function

    def _agrees(
        self, layers: tuple[int, ...] | None, state: DecodeState, inputs: TreeInputs, tensors: Sequence[Tensor],
        function: CompiledFunction,
    ) -> bool:  # fmt: skip
        """Whether a function that was read from disk scores a tree as torch does."""
        logits, hidden = self._score(state, inputs, layers)
        is_node = inputs.parents >= 0
        is_node[:, 0] = True
        for wanted, found in zip([logits] if hidden is None else [logits, hidden], function(tensors), strict=True):
            nodes = is_node[:, inputs.first :].to(wanted.device)
            wanted, found = wanted[nodes].double(), found[nodes].double()
            most = (0.1 if self._lm.dtype.itemsize < 4 else 1e-3) * wanted.abs().max()
            if wanted.shape != found.shape or not bool((wanted - found).abs().max() <= most):
                logger.warning("a compiled function on disk differs from the model, and is compiled again")
                return False
        return True

    def _scoring(
        self, layers: tuple[int, ...] | None, state: DecodeState, inputs: TreeInputs, sizes: _Sizes
    ) -> Example:
        """Return the scoring of a tree, for a trace, and an example's tensors."""
        state, inputs = _examples(state, inputs, sizes)
        own = len(inputs.tensors())

        def run(*tensors: Tensor) -> list[Tensor]:
            logits, hidden = self._score(
                _with_tensors(state, tensors[own], tensors[own + 1 :]), inputs.with_tensors(tensors[:own]), layers
            )
            return [logits] if hidden is None else [logits, hidden]

        return run, [*inputs.tensors(), state.lengths, *state.layer_tensors]

    def _commit(self, state: DecodeState, path: Tensor, sizes: _Sizes) -> Example:
        """Return the commit of a path, for a trace, and an example's tensors."""
        state, (batch, m) = _example_state(state, sizes), path.shape
        path = path.new_zeros(batch, sizes.rows if m > 1 else 1)

        def run(path: Tensor, path_lengths: Tensor, lengths: Tensor, *tensors: Tensor) -> list[Tensor]:
            _with_stacks(state, lengths, tensors).apply(path, path_lengths)
            return []

        return run, [path, path.new_zeros(batch), state.lengths, *state.stack_tensors]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of the example that is traced, each of which becomes a symbol.

    Primes, so that few products of other sizes are equal to one.

    Attributes:
        rows: nodes that a call runs.
        nodes: of a tree.
        max_nodes: of a state.
        max_length: of a state.
    """

    rows: int
    nodes: int
    max_nodes: int
    max_length: int

    @classmethod
    def unlike(cls, taken: Collection[int]) -> _Sizes:
        """Choose sizes that differ from each other and from all that are taken."""
        primes = (n for n in count(13) if all(n % part for part in range(2, isqrt(n) + 1)) and n not in taken)
        rows, nodes, max_nodes = islice(primes, 3)
        return cls(rows, nodes, max_nodes, next(n for n in primes if n > 300))


def _with_tensors(state: DecodeState, lengths: Tensor, tensors: Sequence[Tensor]) -> DecodeState:
    """Return a state of other tensors in the order of ``layer_tensors``."""
    other, rest = copy(state), iter(tensors)
    other.lengths, other.fixed_shapes = lengths, True
    other.max_length = sys.maxsize  # attention reads all rows, without a number of them in the trace
    other.layers = {
        site: replace(layer, **{name: next(rest) for name, _ in layer.tensors()})
        for site, layer in state.layers.items()
    }
    return other


def _with_stacks(state: DecodeState, lengths: Tensor, tensors: Sequence[Tensor]) -> DecodeState:
    """Return a state of other tensors in the order of ``stack_tensors``."""
    other, rest = copy(state), iter(tensors)
    other.lengths = lengths
    other.stacks = {
        spec: replace(stack, **{name: next(rest) for name, _ in stack.tensors()})
        for spec, stack in state.stacks.items()
    }
    return other


def _example_state(state: DecodeState, sizes: _Sizes) -> DecodeState:
    """Return a state of the same kind in which each size that may change is one of ``sizes``."""
    max_nodes = sizes.max_nodes if state.max_nodes > 1 else 1
    return DecodeState(
        state.specs, state.batch_size, sizes.max_length, max_nodes, state.lengths.device, fixed_shapes=True
    )


def _examples(state: DecodeState, inputs: TreeInputs, sizes: _Sizes) -> tuple[DecodeState, TreeInputs]:
    """Return a state and inputs of the same kind in which each size that may change is one of ``sizes``."""
    other, (batch, rows), n = _example_state(state, sizes), inputs.tokens.shape, inputs.parents.shape[1]
    n = other.max_nodes if n == state.max_nodes else sizes.nodes if n > 1 else 1
    rows = n if inputs.first == 0 else sizes.rows if rows > 1 else 1
    shapes = [(batch, rows), (batch, n), (batch, n, n), (batch, n)]
    shapes += [(batch, rows, *tensor.shape[2:]) for tensor in inputs.tensors()[4:]]
    trees = [tensor.new_zeros(shape) for tensor, shape in zip(inputs.tensors(), shapes, strict=True)]
    return other, inputs.with_tensors(trees)
