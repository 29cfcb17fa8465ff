"""Scoring of trees compiled with torch.compile's backend: on a CPU, a small model's step is mostly calls of operators.

The scoring of a tree is traced once with symbolic numbers of nodes and of rows of the caches, and inductor turns the
trace into C++.  Weights and states are inputs of the compiled function, so states of any size share it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from copy import copy
from dataclasses import astuple, dataclass, replace
from itertools import count, islice
from math import isqrt
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stree.kernels.clock import compile_seconds, compiling
from stree.models.state import DecodeState, TreeInputs

if TYPE_CHECKING:
    from stree.models.compiled_function import CompiledFunction

__all__ = ["CompiledScoring"]

logger = logging.getLogger("stree")

Scored = tuple[Tensor, Tensor | None]  # logits, and hidden states where some were asked for
Score = Callable[[DecodeState, TreeInputs, Sequence[int] | None], Scored]


class CompiledScoring:
    """Scores trees as ``score`` does, by functions that are compiled when a kind of call occurs for the first time.

    A kind is: first call or extension of a tree, one node, several or as many as fit, batch size, hidden layers.  Where
    the model's code cannot be compiled for trees of several nodes, that is logged, and all of them are scored in torch;
    where it cannot for trees of one node, likewise all trees.

    Threads may share it.  They read functions without a lock, and one at a time compiles: torch's tracing and inductor
    keep state in globals.

    Args:
        score: scores a tree in torch; it reads no values of tensors and writes only to the state's stash.
        layout: what the functions depend on beside their arguments; see ``layout_of``.
        sizes: of the model; the example that is traced has others where a size is symbolic.

    Attributes:
        compile_s: seconds that compiling has taken so far.
    """

    def __init__(self, score: Score, layout: Hashable, sizes: Collection[int]) -> None:
        self._score, self.layout, self._model_sizes = score, layout, frozenset(sizes)
        self._functions: list[CompiledFunction] = []
        self._by_sizes: dict[Hashable, CompiledFunction | None] = {}  # None: not compiled
        self._most_nodes: int | None = None  # of a tree that can be compiled, once a compilation has failed
        self.compile_s = 0.0

    def __call__(self, state: DecodeState, inputs: TreeInputs, hidden_layers: Sequence[int] | None) -> Scored:
        """Score a tree."""
        layers = None if hidden_layers is None else tuple(hidden_layers)
        kind: Any = layers, inputs.positions is None, *inputs.others
        trees = [tensor.contiguous() for tensor in inputs.tensors()]  # strides are compiled in
        tensors = [*trees, state.lengths, *_layer_tensors(state)]
        sizes = kind, inputs.first, *inputs.tokens.shape, state.max_length, state.max_nodes
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = self._find_or_compile(kind, state, inputs, tensors)
        function = self._by_sizes[sizes]
        if function is None:
            return self._score(state, inputs, hidden_layers)
        logits, *hidden = function(tensors)
        return logits, hidden[0] if hidden else None

    def _find_or_compile(
        self, kind: Any, state: DecodeState, inputs: TreeInputs, tensors: Sequence[Tensor]
    ) -> CompiledFunction | None:
        """Return a function that takes these tensors, or None where the model cannot be compiled for such trees."""
        from stree.models.compiled_function import compile_lock  # imports inductor, which takes seconds

        n = inputs.parents.shape[1]
        with compile_lock:
            for function in self._functions:
                if function.kind == kind and function.takes(tensors):
                    return function
            if self._most_nodes is not None and n > self._most_nodes:
                return None
            began = compile_seconds()
            try:
                with compiling():
                    function = self._compile(kind, state, inputs, tensors)
            except Exception as problem:  # the model's own code may do anything
                self._most_nodes = 0 if n == 1 else 1
                trees = "trees" if n == 1 else "trees of several nodes"
                name, reason = type(problem).__name__, str(problem)[:500]
                logger.warning("%s are scored without compilation: %s: %s", trees, name, reason)
                return None
            finally:
                self.compile_s += compile_seconds() - began
            self._functions.append(function)
            return function

    def _compile(self, kind: Any, state: DecodeState, inputs: TreeInputs, wanted: Sequence[Tensor]) -> CompiledFunction:
        """Trace and compile a call of one kind for the batch size of ``wanted``."""
        from stree.models.compiled_function import CompiledFunction

        symbolic = _Sizes.unlike({size for tensor in wanted for size in tensor.shape} | self._model_sizes)
        state, inputs = _examples(state, inputs, symbolic)
        own = len(inputs.tensors())

        def run(*tensors: Tensor) -> list[Tensor]:
            logits, hidden = self._score(
                _with_tensors(state, tensors[own], tensors[own + 1 :]), inputs.with_tensors(tensors[:own]), kind[0]
            )
            return [logits] if hidden is None else [logits, hidden]

        tensors = [*inputs.tensors(), state.lengths, *_layer_tensors(state)]
        return CompiledFunction.compile(kind, run, tensors, astuple(symbolic), wanted)


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


def _layer_tensors(state: DecodeState) -> list[Tensor]:
    """List the tensors of every layer."""
    return [tensor for layer in state.layers.values() for _, tensor in layer.tensors()]


def _with_tensors(state: DecodeState, lengths: Tensor, tensors: Sequence[Tensor]) -> DecodeState:
    """Return a state of other tensors in the order of ``_layer_tensors``."""
    other, rest = copy(state), iter(tensors)
    other.lengths, other.fixed_shapes = lengths, True
    other.max_length = sys.maxsize  # attention reads all rows, without a number of them in the trace
    other.layers = {
        site: replace(layer, **{name: next(rest) for name, _ in layer.tensors()})
        for site, layer in state.layers.items()
    }
    return other


def _examples(state: DecodeState, inputs: TreeInputs, sizes: _Sizes) -> tuple[DecodeState, TreeInputs]:
    """Return a state and inputs of the same kind in which each size that may change is one of ``sizes``."""
    batch, rows = inputs.tokens.shape
    n = inputs.parents.shape[1]
    max_nodes = sizes.max_nodes if state.max_nodes > 1 else 1
    n = max_nodes if n == state.max_nodes else sizes.nodes if n > 1 else 1
    rows = n if inputs.first == 0 else sizes.rows if rows > 1 else 1
    other = DecodeState(state.specs, batch, sizes.max_length, max_nodes, state.lengths.device, fixed_shapes=True)
    shapes = [(batch, rows), (batch, n), (batch, n, n), (batch, n)]
    shapes += [(batch, rows, *tensor.shape[2:]) for tensor in inputs.tensors()[4:]]
    trees = [tensor.new_zeros(shape) for tensor, shape in zip(inputs.tensors(), shapes, strict=True)]
    return other, inputs.with_tensors(trees)
