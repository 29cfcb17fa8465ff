"""Lazy residual: defers ``residual + x`` until the next RMSNorm, so that one fused kernel does both.

While a tree is scored, mixers and feed-forwards return their output as a sum of one term.  transformers' layers add it
to the residual stream and multiply it by factors as they do with a tensor; the sum is evaluated by the kernel of the
next norm, or when any other code needs the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from stree.kernels import ops

__all__ = ["LazyResidual", "normalise_sum", "with_row_norm"]

MOST_TERMS = 3  # of the kernel
ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)


@dataclass(frozen=True, slots=True, eq=False)
class _UnnormedRows:
    """A term whose rows lack the factor of an RMSNorm before the projection that made them.

    Attributes:
        tensor: float[..., n, c].
        squares: float32[..., n, k], parts of the sum of squares of the rows that were projected.
        norm: columns of those rows, and eps of the norm.
    """

    tensor: Tensor
    squares: Tensor
    norm: tuple[int, float]

    shape = property(lambda self: self.tensor.shape)
    device = property(lambda self: self.tensor.device)
    dtype = property(lambda self: self.tensor.dtype)

    @property
    def value(self) -> Tensor:
        """The rows with their factors."""
        width, eps = self.norm
        factor = torch.rsqrt(self.squares.sum(-1, keepdim=True) / width + eps)
        return (self.tensor * factor).to(self.dtype)


class LazyResidual:
    """A sum of scaled tensors of one shape that is evaluated when it is first read.

    It supports sums, factors, shape, dtype, device and casts; any other use is forwarded to the evaluated tensor.

    Args:
        terms: tensors of one shape, or rows to be normed, with their factors.
        source: the sum of which this object is a cast, or None.
        dtype: of that cast.
    """

    __slots__ = ("_dtype", "_source", "_terms")

    def __init__(
        self,
        terms: Sequence[tuple[Tensor | _UnnormedRows, float]],
        source: LazyResidual | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._terms, self._source, self._dtype = tuple(terms), source, dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of every term."""
        return self._root._terms[0][0].shape

    @property
    def device(self) -> torch.device:
        """Device of the terms."""
        return self._root._terms[0][0].device

    @property
    def dtype(self) -> torch.dtype:
        """The widest dtype of a term, or that of the cast."""
        if self._dtype is not None:
            return self._dtype
        first, *rest = (tensor.dtype for tensor, _ in self._terms)
        for dtype in rest:
            first = torch.promote_types(first, dtype)
        return first

    @property
    def value(self) -> Tensor:
        """The tensor, evaluated at the first call in the order in which transformers' layers add."""
        if self._source is not None:
            return self._source.value.to(self.dtype)
        (tensor, factor), *rest = [(_evaluated(term), factor) for term, factor in self._terms]
        total: Tensor = tensor if factor == 1 else tensor * factor
        for tensor, factor in rest:
            total = total + (tensor if factor == 1 else tensor * factor)
        self._terms = ((total, 1.0),)
        return total

    @property
    def _root(self) -> LazyResidual:
        """The sum of which this is a cast, or this sum."""
        return self if self._source is None else self._source

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Cast without evaluating; any other use of ``Tensor.to`` evaluates the sum."""
        arguments = [*args, *kwargs.values()]
        if len(arguments) == 1 and isinstance(arguments[0], torch.dtype):
            if arguments[0] == self.dtype:
                return self
            if self._source is None:
                return LazyResidual((), self, arguments[0])
        return self.value.to(*args, **kwargs)

    def __add__(self, other: Any) -> Any:
        """Add a tensor or another sum."""
        return self._joined(other, self_first=True)

    def __radd__(self, other: Any) -> Any:
        """Add to a tensor on the left."""
        return self._joined(other, self_first=False)

    def __mul__(self, factor: Any) -> Any:
        """Scale every term by a number."""
        if self._source is None and isinstance(factor, (int, float)):
            return LazyResidual([(tensor, scale * factor) for tensor, scale in self._terms])
        return self.value * factor

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the evaluated tensor; special methods are looked up on the class, not here."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Evaluate arguments of torch functions; adding a tensor stays lazy."""
        if func in ADDITIONS and len(args) == 2 and not kwargs:
            left, right = args
            return left + right if isinstance(left, LazyResidual) else right.__radd__(left)
        return func(*tree_map(_evaluated, tuple(args)), **tree_map(_evaluated, dict(kwargs or {})))

    def _joined(self, other: Any, *, self_first: bool) -> Any:
        """Append terms if a norm can still add them up, in the order of the operands."""
        fits = isinstance(other, (Tensor, LazyResidual)) and other.shape == self.shape and other.device == self.device
        if not fits or self._source is not None or getattr(other, "_source", None) is not None:
            return self.value + _evaluated(other)
        others = other._terms if isinstance(other, LazyResidual) else ((other, 1.0),)
        terms = self._terms
        if len(terms) + len(others) > MOST_TERMS:
            terms, others = ((self.value, 1.0),), ((_evaluated(other), 1.0),)
        return LazyResidual((*terms, *others) if self_first else (*others, *terms))


def _delegated(name: str) -> Callable[..., Any]:
    """Make a special method that calls that of the evaluated tensor."""

    def method(self: LazyResidual, *args: Any) -> Any:
        return getattr(self.value, name)(*map(_evaluated, args))

    return method


for _name in ("__getitem__", "__sub__", "__rsub__", "__truediv__", "__neg__", "__matmul__", "__pow__", "__len__"):
    setattr(LazyResidual, _name, _delegated(_name))


def _evaluated(value: Any) -> Any:
    """Return the tensor of a lazy residual or of rows to be normed; other values unchanged."""
    return value.value if isinstance(value, (LazyResidual, _UnnormedRows)) else value


def with_row_norm(x: Tensor, squares: Tensor, width: int, eps: float) -> LazyResidual:
    """Multiply the rows of a projection by the factor of the RMSNorm before it, in the launch of the next norm.

    Args:
        x: float[..., n, c], projected from rows without their factor.
        squares: float32[..., n, k], parts of the sum of squares of each of those rows.
        width: columns of those rows.
        eps: added to their mean square.
    """
    return LazyResidual([(_UnnormedRows(x, squares, (width, eps)), 1.0)])


def normalise_sum(x: LazyResidual, weight: Tensor, *, eps: float, offset: float) -> Tensor:
    """Evaluate a sum and normalise its rows in one launch; the sum is stored.

    Args:
        x: float[..., c].
        weight: float[c].
        eps: added to the mean square.
        offset: added to the weight.

    Returns:
        float[..., c], dtype of x.
    """
    root = x._root
    streams = (
        i for i, (term, scale) in enumerate(root._terms)
        if scale == 1 and term.dtype == root.dtype and isinstance(term, Tensor)
    )  # fmt: skip
    stream = next(streams, None)
    rest = [term for i, term in enumerate(root._terms) if i != stream]
    rest.sort(key=lambda each: isinstance(each[0], Tensor))  # rows to be normed first
    if stream is None or not rest:
        return ops.rms_norm(x.value, weight, eps=eps, offset=offset)
    (term, scale), (other, other_scale) = rest[0], rest[1] if rest[1:] else (None, 1.0)
    options: dict[str, Any] = {} if term.dtype == x.dtype else {"dtype": x.dtype}
    if isinstance(term, _UnnormedRows):
        options |= {"squares": term.squares, "squares_norm": term.norm}
        term = term.tensor
    y, total = ops.rms_norm_add(
        term, _evaluated(root._terms[stream][0]), weight, eps=eps, offset=offset, scale=scale,
        other=_evaluated(other), other_scale=other_scale, **options,
    )  # fmt: skip
    root._terms = ((total, 1.0),)
    return y
