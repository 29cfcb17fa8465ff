"""The decorator that declares an operation: it writes out the checks of its arguments from their shapes.

An operation of `stree.kernels.ops` is a declaration: signature, docstring, shapes.  `operation` turns it into a
function that checks every argument, makes a `Topology` of the trees and an `AcceptedPath` of the path, and calls the
function of the same name in the reference, for CUDA tensors in the Triton module, or on the CPU in a module of its
own; a module is imported with its first call.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from stree.kernels import checks, dispatch
from stree.kernels.dispatch import CPU, REFERENCE, TRITON, Operands, choose

__all__ = ["operation"]

P = ParamSpec("P")
R = TypeVar("R")


def operation(
    triton: str, *rules: str, cpu: str | None = None, bare_path: bool = False, **shapes: str | tuple[str, ...]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operation on tensors of given shapes; the decorated function's body checks values, if anything.

    A shape is a list of axes.  Equal names are equal sizes; the first tensor in the signature that has a name sets it.

        x="b n h p"              a floating tensor with these axes
        y="b n-first 2*h"        an axis may be an expression of names and of integer arguments
        D="h?"                   a tensor or None
        A="h | b h"              either; all arguments with alternatives take the same one
        x="... n c"              any further axes in front
        lengths="b: int32"       another dtype
        state="b h p: wide x"    float32, or float64 where x is
        previous=("b F c", "b F")  a tuple of tensors, or None
        ngroups="= g"            an integer argument that is the size of an axis
        act="one of silu, None"  a word, or None

    `parents` is int32[b, n] or a `Topology`, and `path` with `path_lengths` int32[b, m] and int32[b], an
    `AcceptedPath` or None; implementations take them as `topology` and `accepted`.  An implementation with more than
    six positional arguments takes all of its arguments as one `Operands`, any other as they are.

    The checks run for every layer of every step, so they are written out as one function, as dataclasses write theirs:
    a loop over shapes takes twice as long.  Tracebacks show it, and so does `inspect.getsource` of its code.

    Args:
        triton: module of the Triton version, below stree.kernels; the reference is reference.py in the same folder.
        cpu: module of a version for the CPU, likewise; None: there the reference runs.
        rules: what sizes must satisfy: "n <= N", "g divides h".
        bare_path: whether the implementation takes `path` and `path_lengths` as they are, without derived indices.
        shapes: of each argument.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        op = function.__name__
        REFERENCE[op] = f"stree.kernels.{triton.rpartition('.')[0]}.reference"
        TRITON[op] = f"stree.kernels.{triton}"
        if cpu is not None:
            CPU[op] = f"stree.kernels.{cpu}"
        source = _Source(function, shapes, rules, bare_path).write()
        defaults = {f"default_{name}": p.default for name, p in inspect.signature(function).parameters.items()}
        used = {"choose": choose, "checks": checks, "dispatch": dispatch, "Operands": Operands, "declared": function}
        names: dict[str, Any] = {**vars(checks), **used, **defaults}
        file = f"<checks of {op}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), names)
        call: Callable[P, R] = functools.update_wrapper(names[op], function)
        listed = ", ".join(f"{name} [{text}]" for name, text in shapes.items())
        call.__doc__ = f"{function.__doc__}\n\n    Shapes: {listed}."
        return call

    return declare


class _Source:
    """The lines of the function that checks the arguments of a declared operation and calls its implementation.

    It has the signature of the declared function and uses the names of `stree.kernels.checks`, `dispatch`, `choose`,
    `Operands`, `declared` (that function itself, where its body checks values) and `default_x` for the default of x.
    For what the arguments mean see `operation`.
    """

    def __init__(
        self, function: Callable[..., Any], shapes: Mapping[str, str | tuple[str, ...]], rules: tuple[str, ...],
        bare_path: bool,
    ) -> None:  # fmt: skip
        self._function, self._bare_path = function, bare_path
        self._parameters = inspect.signature(function).parameters
        self._lines: list[str] = []
        # Where each name of a size comes from, for messages; integer arguments are sizes too.
        self._origins = {name: name for name, p in self._parameters.items() if p.annotation in ("int", "bool")}
        self._integers = set(self._origins)
        self._rules = list(rules)
        self._shapes: dict[str, list[_Shape]] = {}
        for name in self._parameters:
            text = shapes.get(name, "")
            if isinstance(text, tuple):
                self._shapes[name] = [_Shape.parse(f"{name}[{i}]", part) for i, part in enumerate(text)]
            elif text.startswith("one of "):
                choices = tuple(None if word == "None" else word for word in text.removeprefix("one of ").split(", "))
                self._line(1, f"if {name} not in {choices}:")
                self._line(2, f"refuse_choice({name!r}, {name}, {choices})")
            elif text.startswith("="):
                self._line(1, f"_{text[1:].strip()} = {name}")
                self._origins[text[1:].strip()] = name
            elif text:
                self._shapes[name] = [_Shape.parse(name, text)]
        every = [shape for part in self._shapes.values() for shape in part]
        self._like = next((shape for shape in every if shape.kind == "float"), every[0])
        self._is_named_whole = False  # whether every size of the first tensor gets its name there
        self._chooser = next((shape for shape in every if len(shape.options) > 1), None)

    def write(self) -> str:
        """Write the whole function."""
        optional = {name for name, shapes in self._shapes.items() if len(shapes) > 1 or shapes[0].is_optional}
        wide = dict.fromkeys(shape.wide_of for shapes in self._shapes.values() for shape in shapes if shape.wide_of)
        for shape in (self._shapes[name][0] for name in self._shapes if name not in optional):
            self._name_sizes(1, shape)
        if "parents" in self._parameters:
            self._take_topology()
        self._check_rules(1)
        self._line(1, f"device = {self._like.name}.device")
        for name in wide:
            self._line(1, f'wide_{name} = "float64" if {name}.dtype == torch.float64 else "float32"')
        for name, shapes in self._shapes.items():
            depth = 1
            if name in optional:
                depth = 2
                self._line(1, f"if {name} is not None:")
            for shape in shapes:
                self._name_sizes(depth, shape)
                self._check_rules(depth)
                self._check(depth, shape)
        self._take_path()
        name, like = repr(self._function.__name__), self._like.name
        self._line(1, f"chosen = dispatch.bound({name}, backend, device.type, {like}.dtype, dispatch._behaviour.get())")
        self._line(1, f"return (chosen or choose({name}, backend, {like}))({self._arguments()})")
        return "\n".join([f"def {self._function.__name__}({self._signature()}):", *self._first_lines(), *self._lines])

    def _line(self, depth: int, text: str) -> None:
        self._lines.append("    " * depth + text)

    def _first_lines(self) -> list[str]:
        """Call the declared function where its body checks values."""
        passed = ", ".join(
            name if p.kind is p.POSITIONAL_OR_KEYWORD else f"{name}={name}" for name, p in self._parameters.items()
        )
        return [f"    declared({passed})"] if self._function.__code__.co_names else []

    def _signature(self) -> str:
        """Write the parameters with their defaults."""
        parts: list[str] = []
        for name, p in self._parameters.items():
            if p.kind is p.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            parts.append(name if p.default is p.empty else f"{name}=default_{name}")
        return ", ".join(parts)

    def _arguments(self) -> str:
        """Write what the implementation is given."""
        renamed = {"parents": "topology"} | ({} if self._bare_path else {"path": "accepted"})
        left_out = {"backend"} if self._bare_path else {"backend", "path_lengths"}
        passed = {name: p for name, p in self._parameters.items() if name not in left_out}
        operands = [renamed.get(name, name) for name, p in passed.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        options = [f"{name}={name}" for name, p in passed.items() if p.kind is p.KEYWORD_ONLY]
        if len(operands) > 6:
            return f"Operands({', '.join([f'{name}={name}' for name in operands] + options)})"
        return ", ".join(operands + options)

    def _size(self, expression: str) -> str:
        """Write an expression of sizes: axes are locals with an underscore in front, unlike arguments of that name."""
        return re.sub(r"[A-Za-z_]\w*", lambda m: m[0] if m[0] in {"in", *self._integers} else f"_{m[0]}", expression)

    def _tuple(self, axes: tuple[str, ...]) -> str:
        return "(" + "".join(f"{'*_rest' if axis == '...' else self._size(axis)}, " for axis in axes).rstrip(" ") + ")"

    def _name_sizes(self, depth: int, shape: _Shape) -> None:
        """Name the sizes that this tensor is the first to have."""
        axes = shape.options[0]
        new = [axis for axis in axes if (axis.isidentifier() or axis == "...") and axis not in self._origins]
        if not new:
            return
        self._is_named_whole |= shape is self._like and len(new) == len(axes)
        self._origins |= dict.fromkeys(new, f"{shape.name} [{', '.join(axes)}]")
        compared = "<" if "..." in axes else "!="
        self._line(depth, f"if {shape.name}.ndim {compared} {len([axis for axis in axes if axis != '...'])}:")
        self._line(depth + 1, f"check_rank({shape.name!r}, {shape.name}, {' '.join(axes)!r})")
        targets = [("*_rest" if axis == "..." else f"_{axis}") if axis in new else "_" for axis in axes]
        self._line(depth, f"{', '.join(targets)}, = {shape.name}.shape")

    def _check(self, depth: int, shape: _Shape) -> None:
        """Check one tensor against the sizes."""
        name, like = shape.name, self._like
        wanted = self._tuple(shape.options[-1])
        if shape is not like and shape.options == like.options:
            wanted = f"{like.name}.shape"
        elif len(shape.options) > 1 and self._chooser is not None:
            rank = len(self._chooser.options[0])
            wanted = f"({self._tuple(shape.options[0])} if {self._chooser.name}.ndim == {rank} else {wanted})"
        kind = f"wide_{shape.wide_of}" if shape.wide_of else repr(shape.kind)
        differs = f"{name}.dtype not in KINDS[{kind}]"
        if shape is not like or not self._is_named_whole:
            differs += f" or {name}.shape != {wanted} or {name}.device != device"
        self._line(depth, f"if {differs}:")
        self._line(depth + 1, f"check({name!r}, {name}, {kind}, {wanted}, {like.name})")

    def _check_rules(self, depth: int) -> None:
        """Check the rules whose sizes have names by now."""
        for rule in list(self._rules):
            names = list(dict.fromkeys(re.findall(r"[A-Za-z_]\w*", re.sub(r"\b(divides|in)\b", "", rule))))
            if not set(names) <= self._origins.keys():
                continue
            self._rules.remove(rule)
            part, divides, whole = (self._size(text) for text in rule.partition(" divides "))
            holds = f"{part} > 0 and {whole} % ({part}) == 0" if divides else self._size(rule)
            origins = {name: "" if name in self._integers else f" of {self._origins[name]}" for name in names}
            got = " and ".join(f"{name} = {{{self._size(name)}}}{origin}" for name, origin in origins.items())
            self._line(depth, f"if not ({holds}):")
            self._line(depth + 1, f"raise ValueError(f{f'{self._function.__name__} needs that {rule}, got {got}'!r})")

    def _take_topology(self) -> None:
        """Check the trees and count their nodes, or compare with the rows that there are for them."""
        first, like = "first" if "first" in self._parameters else "0", self._like.name
        # What `take_topology` would require of the topology that the layers of a step share, without a call.
        fits = (
            "type(parents) is Topology and (tree := parents.parents).dtype == torch.int32 and tree.shape[0] == _b > 0 "
            f"and tree.device == {like}.device and 0 <= {first} < tree.shape[1]"
        )
        self._line(
            1, f"topology = parents if {fits} and not checks.DEBUG else take_topology(parents, _b, {first}, {like})"
        )
        if "n" in self._origins:
            self._line(1, f"check_nodes({self._origins['n'].partition(' ')[0]!r}, _n, topology)")
        else:
            self._line(1, "_n = topology.parents.shape[1]")
            self._origins["n"] = "parents [b, n]"

    def _take_path(self) -> None:
        """Check the path and derive its indices."""
        if self._bare_path:
            self._line(1, f"check_path(path, path_lengths, _b, {self._like.name})")
        elif "path" in self._parameters:
            taken = f"take_path(path, path_lengths, _b, {self._like.name})"
            self._line(1, f"accepted = None if path is None else {taken}")


@dataclass(frozen=True, slots=True)
class _Shape:
    """What is required of one tensor.

    Attributes:
        name: the argument, or an expression for a part of it.
        options: its axes, for each alternative.
        kind: dtype, a key of `checks.KINDS`.
        wide_of: tensor that makes it float64 if it is float64 itself; float32 otherwise.  "" for a fixed kind.
        is_optional: whether None will do.
    """

    name: str
    options: tuple[tuple[str, ...], ...]
    kind: str
    wide_of: str
    is_optional: bool

    @classmethod
    def parse(cls, name: str, text: str) -> _Shape:
        """Read "axes [| axes] [: kind] [?]"."""
        axes, _, kind = text.removesuffix("?").partition(":")
        wide = kind.strip().removeprefix("wide ") if kind.strip().startswith("wide ") else ""
        options = tuple(tuple(option.split()) for option in axes.split("|"))
        return cls(name, options, kind.strip() or "float", wide, text.endswith("?"))
