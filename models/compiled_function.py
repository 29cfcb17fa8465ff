"""One compiled function: a trace with symbolic sizes, turned into C++ by inductor.  Importing this takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._inductor import standalone_compile
from torch._inductor.standalone_compile import CompiledArtifact
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.printers import PythonPrinter

from stree.kernels.dispatch import as_on_device

__all__ = ["CompiledFunction", "compile_lock"]

# Only tensors of the right sizes are passed.  Since 2.14 torch reads some symbolic sizes for these checks alone.
CONFIG = {"size_asserts": torch.__version__ >= "2.14"}
# What a linear layer's sum over products reads is computed before it, not anew for each of its rows.
ONE_ROW = {"realize_acc_reads_threshold": 1}


@dataclass(frozen=True, slots=True, eq=False)
class CompiledFunction:
    """A compiled function; threads may call it at once.

    Attributes:
        kind: of the calls that it serves.
        compiled: takes tensors as those that it was traced with, then the weights.
        weights: parameters, buffers and constants that the trace read.
        shapes: sizes of the tensors, or names of symbols.
        conditions: what the trace and inductor assumed of the symbols, an expression of Python.
    """

    kind: Hashable
    compiled: Callable[..., Any]
    weights: list[Tensor]
    shapes: list[list[int | str]]
    conditions: str

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run it."""
        result: Sequence[Tensor] = self.compiled(*tensors, *self.weights)
        return result

    @classmethod
    def compile(
        cls,
        kind: Hashable,
        run: Callable[..., list[Tensor]],
        tensors: Sequence[Tensor],
        symbolic: Collection[int],
        wanted: Sequence[Tensor],
        *,
        has_one_row: bool = False,
    ) -> CompiledFunction:
        """Trace a function and compile it, so that it takes tensors of other sizes than those that it is traced with.

        Only the thread that holds ``compile_lock`` may compile.

        Args:
            kind: of the calls that it will serve.
            run: what is traced.
            tensors: that it is traced with.
            symbolic: sizes of these tensors that become symbols; no other size is equal to one.
            wanted: tensors that it must take.
            has_one_row: whether it scores one node of one sequence.

        Raises:
            ValueError: the traced code depends on sizes, and is another one for ``wanted``.
        """
        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
        fakes: list[Any] = [_fake(mode, tensor, symbolic) for tensor in tensors]
        with mode, enable_python_dispatcher(), as_on_device(triton=False):  # the host reads no values
            graph = make_fx(run, _allow_non_fake_inputs=True)(*fakes)
        if not cls.holds(wanted, *_assumptions(env, fakes)):
            raise ValueError("the model runs other operations on other sizes")
        num_tensors = len(fakes)
        weights = _lift_constants(graph)
        fakes += [_fake(mode, weight, ()) for weight in weights]
        with tracing(TracingContext(mode)):
            options = {"config_patches": CONFIG | ONE_ROW if has_one_row else CONFIG}
            compiled: Any = standalone_compile(graph, fakes, dynamic_shapes="from_tracing_context", options=options)
        function = cls(kind, compiled, weights, *_assumptions(env, fakes[:num_tensors]))
        if not function.takes(wanted):
            raise ValueError("inductor's code holds for the sizes of its example only")
        return function

    @classmethod
    def load(
        cls, file: Path, kind: Hashable, weights: list[Tensor], shapes: list[list[int | str]], conditions: str
    ) -> CompiledFunction:
        """Read what ``save`` has written; the other arguments are the attributes of the function that was saved."""
        return cls(kind, CompiledArtifact.load(path=str(file)), weights, shapes, conditions)

    def save(self, file: Path) -> None:
        """Write what inductor has made.

        Raises:
            Exception: inductor cannot write it, as where its cache is off.
        """
        artifact: Any = self.compiled
        artifact.save(path=str(file))

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is right for tensors of these sizes."""
        return self.holds(tensors, self.shapes, self.conditions)

    @staticmethod
    def holds(tensors: Sequence[Tensor], shapes: list[list[int | str]], conditions: str) -> bool:
        """Whether tensors have these shapes, and what was assumed of the symbols in them is true."""
        values: dict[str, int] = {}
        for shape, tensor in zip(shapes, tensors, strict=True):
            if len(shape) != tensor.dim():
                return False
            for wanted, size in zip(shape, tensor.shape, strict=True):
                if (wanted if isinstance(wanted, int) else values.setdefault(wanted, size)) != size:
                    return False
        return bool(eval(conditions, {}, values))


def _assumptions(env: ShapeEnv, fakes: Sequence[Tensor]) -> tuple[list[list[int | str]], str]:
    """Return shapes of tensors, with names of symbols, and what is assumed of these as an expression of Python.

    To substitute sizes in sympy's expressions would take a millisecond for each new size of a state.  Other symbols are
    sizes and offsets of storages, which are laid out alike in all states of these sizes.
    """
    shapes = [[*map(_expression, fake.shape)] for fake in fakes]
    symbols = {size for shape in shapes for size in shape if not isinstance(size, int)}
    assumed = [env.replace(guard.expr) for guard in env.guards]
    conditions = [PythonPrinter().doprint(one) for one in assumed if one.free_symbols <= symbols]
    for symbol in sorted(symbols, key=str):
        lower, upper = env.var_to_range[symbol].lower, env.var_to_range[symbol].upper
        conditions.append(f"{lower} <= {symbol}" + (f" <= {upper}" if upper.is_Integer else ""))
    named = [[size if isinstance(size, int) else str(size) for size in shape] for shape in shapes]
    return named, " and ".join(dict.fromkeys(conditions)) or "True"


def _fake(mode: FakeTensorMode, tensor: Tensor, symbolic: Collection[int]) -> Tensor:
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
    for name in names:
        delattr(graph, name)  # inductor would make it an input once more
    graph.recompile()
    return weights
