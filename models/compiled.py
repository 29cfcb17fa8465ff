"""Scoring of trees compiled with torch.compile's backend: on a CPU, a small model's step is mostly calls of operators.

The scoring of a tree is traced once with symbolic numbers of nodes and of rows of the caches, and inductor turns the
trace into C++.  Weights and states are inputs of the compiled function, so states of any size share it.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from stree.kernels.clock import begin_compiling, compile_seconds, end_compiling
from stree.kernels.dispatch import as_on_device
from stree.models.state import DecodeState, TreeInputs

__all__ = ["CompiledScoring"]

logger = logging.getLogger("stree")

# Sizes of the example that is traced: primes, so that they are not taken for a size of the model.
ROWS, NODES, MAX_NODES, MAX_LENGTH = SYMBOLIC = 13, 17, 19, 311

Scored = tuple[Tensor, Tensor | None]  # logits, and hidden states where some were asked for
Score = Callable[[DecodeState, TreeInputs, Sequence[int] | None], Scored]


class CompiledScoring:
    """Scores trees as ``score`` does, by functions that are compiled when a kind of call occurs for the first time.

    A kind is: first call or extension of a tree, one node, several or as many as fit, batch size, hidden layers.  Where
    the model's code cannot be traced, that is logged, and trees are scored in torch.

    Args:
        score: scores a tree in torch; it reads no values of tensors and writes only to the state's stash.

    Attributes:
        compile_s: seconds that compiling has taken so far.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._functions: list[_Function] = []
        self._by_sizes: dict[Hashable, _Function] = {}
        self._is_traceable = True
        self._lock = threading.Lock()
        self.compile_s = 0.0

    def __call__(self, state: DecodeState, inputs: TreeInputs, hidden_layers: Sequence[int] | None) -> Scored:
        """Score a tree."""
        layers = None if hidden_layers is None else tuple(hidden_layers)
        kind: Any = layers, inputs.positions is None, *inputs.others
        trees = [tensor.contiguous() for tensor in inputs.tensors()]  # strides are compiled in
        tensors = [*trees, state.lengths, *_layer_tensors(state)]
        sizes = kind, inputs.first, *inputs.tokens.shape, state.max_length, state.max_nodes
        if sizes not in self._by_sizes:
            with self._lock:
                function = self._find(kind, tensors) or self._compile(kind, state, inputs, tensors)
            if function is None:
                return self._score(state, inputs, hidden_layers)
            self._by_sizes[sizes] = function
        return self._by_sizes[sizes](tensors)

    def _find(self, kind: Hashable, tensors: Sequence[Tensor]) -> _Function | None:
        """Return the compiled function that takes tensors of these sizes, or None."""
        return next((f for f in self._functions if f.kind == kind and f.takes(tensors)), None)

    def _compile(self, kind: Any, state: DecodeState, inputs: TreeInputs, wanted: Sequence[Tensor]) -> _Function | None:
        """Trace and compile one kind of call; None where the model cannot be traced."""
        if not self._is_traceable:
            return None

        state, inputs = _examples(state, inputs)
        own = len(inputs.tensors())

        def run(*tensors: Tensor) -> list[Tensor]:
            logits, hidden = self._score(
                _with_tensors(state, tensors[own], tensors[own + 1 :]), inputs.with_tensors(tensors[:own]), kind[0]
            )
            return [logits] if hidden is None else [logits, hidden]

        began = compile_seconds()
        begin_compiling()
        try:
            tensors = [*inputs.tensors(), state.lengths, *_layer_tensors(state)]
            function = _Function.compile(kind, run, tensors)
            if not function.takes(wanted):
                raise ValueError("the trace holds for its own sizes only")
        except Exception as problem:  # the model's own code may do anything
            self._is_traceable = False
            logger.warning("trees are scored without compilation: %s: %s", type(problem).__name__, str(problem)[:500])
            return None
        finally:
            end_compiling()
            self.compile_s += compile_seconds() - began
        self._functions.append(function)
        return function


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A compiled function.

    Attributes:
        kind: of the calls that it serves.
        compiled: takes tensors as those that it was traced with, then the weights.
        weights: parameters, buffers and constants that the trace read.
        shapes: sizes of the tensors, symbols included.
        shape_env: what the trace assumed of the symbols.
    """

    kind: Hashable
    compiled: Callable[..., Any]
    weights: list[Tensor]
    shapes: list[tuple[Any, ...]]
    shape_env: ShapeEnv

    def __call__(self, tensors: Sequence[Tensor]) -> Scored:
        """Run it."""
        logits, *hidden = self.compiled(*tensors, *self.weights)
        return logits, hidden[0] if hidden else None

    @classmethod
    def compile(cls, kind: Hashable, run: Callable[..., list[Tensor]], tensors: Sequence[Tensor]) -> _Function:
        """Trace ``run``, with the sizes of ``_examples`` symbolic, and compile it."""
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        fakes = [_fake(mode, tensor, SYMBOLIC) for tensor in tensors]
        with mode, enable_python_dispatcher(), as_on_device(triton=False):  # the host reads no values
            graph = make_fx(run, _allow_non_fake_inputs=True)(*fakes)
        weights = _lift_constants(graph)
        fakes += [_fake(mode, weight, ()) for weight in weights]
        with tracing(TracingContext(mode)):
            compiled: Any = compile_fx(graph, fakes)
        shapes = [tuple(map(_expression, fake.shape)) for fake in fakes[: len(tensors)]]
        return cls(kind, compiled, weights, shapes, env)

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is right for tensors of these sizes."""
        values: dict[Any, int] = {}
        for shape, tensor in zip(self.shapes, tensors, strict=True):
            if len(shape) != tensor.dim():
                return False
            for wanted, size in zip(shape, tensor.shape, strict=True):
                if (wanted if isinstance(wanted, int) else values.setdefault(wanted, size)) != size:
                    return False
        ranges = self.shape_env.var_to_range
        in_range = all(ranges[symbol].lower <= size <= ranges[symbol].upper for symbol, size in values.items())
        assumed = [self.shape_env.replace(guard.expr) for guard in self.shape_env.guards]
        # The other symbols are sizes and offsets of storages, which are laid out alike in all states of these sizes.
        return in_range and all(bool(one.subs(values)) for one in assumed if one.free_symbols <= values.keys())


def _fake(mode: FakeTensorMode, tensor: Tensor, symbolic: Sequence[int]) -> Tensor:
    """Return a tensor without data for tracing; each of the ``symbolic`` sizes becomes one symbol."""
    sizes = [DimDynamic.DUCK if size in symbolic else DimDynamic.STATIC for size in tensor.shape]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor.detach(), symbolic_context=context)


def _expression(size: Any) -> Any:
    """Return a size as an integer or a symbol."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression  # the trace may have assumed one size


def _lift_constants(graph: GraphModule) -> list[Tensor]:
    """Make the tensors that a trace holds its last inputs, and return them."""
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    names = list(dict.fromkeys(node.target for node in constants))
    after = next(node for node in graph.graph.nodes if node.op != "placeholder")
    with graph.graph.inserting_before(after):
        inputs = {name: graph.graph.placeholder(f"weight{number}") for number, name in enumerate(names)}
    for node in constants:
        node.replace_all_uses_with(inputs[node.target])
        graph.graph.erase_node(node)
    weights = [getattr(graph, name) for name in names]
    graph.recompile()
    return weights


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


def _examples(state: DecodeState, inputs: TreeInputs) -> tuple[DecodeState, TreeInputs]:
    """Return a state and inputs of the same kind whose symbolic sizes differ from each other and from all others."""
    batch, count = inputs.tokens.shape
    n = inputs.parents.shape[1]
    max_nodes = MAX_NODES if state.max_nodes > 1 else 1
    n = max_nodes if n == state.max_nodes else NODES if n > 1 else 1
    rows = n if inputs.first == 0 else ROWS if count > 1 else 1
    other = DecodeState(state.specs, batch, MAX_LENGTH, max_nodes, state.lengths.device, fixed_shapes=True)
    shapes = [(batch, rows), (batch, n), (batch, n, n), (batch, n)]
    shapes += [(batch, rows, *tensor.shape[2:]) for tensor in inputs.tensors()[4:]]
    trees = [tensor.new_zeros(shape) for tensor, shape in zip(inputs.tensors(), shapes, strict=True)]
    return other, inputs.with_tensors(trees)
