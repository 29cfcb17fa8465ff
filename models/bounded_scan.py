"""Scans of transformers' torch functions in slices of rows, tokens or channels, so that prefill's memory is bounded.

One call of such a function makes float32 temporaries for all rows and tokens at once: 64 GiB for eight rows of one
token in Bamba-9B (transformers 5.17, whose products are not einsums).  Slices of rows and channels compute the same
values; slices of tokens pass the state on, and chunks of fewer tokens group the same sums otherwise.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stree.models.peak_bytes import peak_bytes

__all__ = [
    "MOST_BYTES",
    "SCANS",
    "bounds_memory",
    "memory_bounded",
    "run_in_slices",
    "scan_bytes",
    "scan_without_values",
]

MOST_BYTES = 2**29  # of a scan's temporaries; more only where one row of LEAST_CHUNK tokens needs more
LEAST_CHUNK = 16  # tokens
CACHED_BYTES = 2**23  # of a scan in chunks on a CPU: twice as fast while they are in its cache
MOST_CHUNKS = 64  # likewise: more of them bring nothing, and their peak takes long to measure

_is_on: ContextVar[bool] = ContextVar("memory_bounded", default=False)
_peaks: dict[Any, int] = {}


@dataclass(frozen=True, slots=True)
class ChunkScan:
    """Arguments of a function that scans chunks of tokens.

    Attributes:
        rows: names of the tensors [batch, tokens, ...].
        initial: name of the state before the first token.
        returns_state: name of the flag under which the function returns output and state.
    """

    rows: tuple[str, ...]
    initial: str
    returns_state: str


@dataclass(frozen=True, slots=True)
class ChannelScan:
    """Arguments of a function that scans independent channels token by token, and takes no state.

    Attributes:
        both: names of the tensors [batch, channels, ...].
        rows: names of the tensors [batch, ...].
        channels: names of the tensors [channels, ...].
    """

    both: tuple[str, ...]
    rows: tuple[str, ...]
    channels: tuple[str, ...]


_DELTA = ChunkScan(("query", "key", "value", "g", "beta"), "initial_state", "output_final_state")
SCANS: dict[str, ChunkScan | ChannelScan] = {  # by the names of the packages' functions
    "mamba_chunk_scan_combined": ChunkScan(("hidden_states", "dt", "B", "C"), "initial_states", "return_final_states"),
    "chunk_gated_delta_rule": _DELTA,
    "chunk_kda": _DELTA,
    "selective_scan_fn": ChannelScan(("hidden_states", "dt", "z"), ("B", "C"), ("A", "D", "delta_bias")),
}


@dataclass(frozen=True, slots=True)
class Slices:
    """Sizes of the slices of one scan, and the bytes of the temporaries of the largest slice."""

    rows: int
    tokens: int
    chunk: int
    num_bytes: int


def bounds_memory() -> bool:
    """Return whether the forward that runs now bounds the memory of its scans."""
    return _is_on.get()


@contextmanager
def memory_bounded() -> Iterator[None]:
    """Bound the memory of scans in the forwards inside."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def run_in_slices(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a torch function of transformers, in slices if one call would make more than ``MOST_BYTES`` of temporaries.

    Args:
        name: of the package's function that it replaces, a key of ``SCANS``.
        function: the torch function.
        args: its arguments.
        kwargs: its further arguments; those that it does not name are left out.
    """
    scan, given = SCANS[name], _bound(function, args, kwargs)
    if isinstance(scan, ChannelScan):
        return _run_channels(scan, function, given)
    return _run_chunks(scan, function, given)


def scan_bytes(name: str, function: Callable[..., Any], device: torch.device, **kwargs: Any) -> int:
    """Return the bytes of temporaries that ``run_in_slices`` makes on a device; the arguments may be on ``meta``."""
    scan, given = SCANS[name], _bound(function, (), kwargs)
    if isinstance(scan, ChunkScan):
        return _chunk_slices(scan, function, given, device).num_bytes
    rows, channels = _channel_slices(given)
    return rows * channels * _channel_bytes(given)


def scan_without_values(
    name: str, function: Callable[..., Any], *args: Any, has_temporaries_on: torch.device | None, **kwargs: Any
) -> Any:
    """Return what ``run_in_slices`` does of tensors on ``meta``, by a scan of one chunk or token.

    Args:
        name: of the package's function that the torch function replaces, a key of ``SCANS``.
        function: the torch function.
        args: its arguments.
        has_temporaries_on: device whose temporaries of all tokens are allocated on ``meta`` and freed, or None.
        kwargs: its further arguments.
    """
    scan, given = SCANS[name], _bound(function, args, kwargs)
    if has_temporaries_on is not None:
        torch.empty(scan_bytes(name, function, has_temporaries_on, **given), dtype=torch.uint8, device="meta")
    if isinstance(scan, ChannelScan):
        one = {name: given[name][..., :1] for name in (*scan.both, *scan.rows) if given[name] is not None}
        piece, state = function(**given | one | {"return_last_state": True})
        output = piece.new_empty(given["hidden_states"].shape)
        return (output, state) if given["return_last_state"] else output
    one = {name: given[name][:, : given["chunk_size"]] for name in scan.rows}
    piece, view = function(**given | one | {scan.returns_state: True})
    output, state = piece.new_empty(*given[scan.rows[0]].shape[:2], *piece.shape[2:]), view.clone()
    if given[scan.returns_state]:
        return output, state
    return (output, None) if scan is _DELTA else output


_signature = functools.cache(inspect.signature)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults."""
    parameters = _signature(function).parameters
    call = _signature(function).bind(*args, **{name: one for name, one in kwargs.items() if name in parameters})
    call.apply_defaults()
    return {name: one for name, one in call.arguments.items() if parameters[name].kind is not Parameter.VAR_KEYWORD}


def _run_chunks(scan: ChunkScan, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Run slices of rows and tokens; the state goes from one slice of tokens to the next."""
    batch, length = given[scan.rows[0]].shape[:2]
    slices = _chunk_slices(scan, function, given, given[scan.rows[0]].device)
    if slices.rows >= batch and slices.tokens >= length and slices.chunk == given["chunk_size"]:
        return function(**given)
    output: Any = None
    last: Any = None
    for row in range(0, batch, slices.rows):
        part = slice(row, row + slices.rows)
        state = None if given[scan.initial] is None else given[scan.initial][part]
        for begin in range(0, length, slices.tokens):
            columns = slice(begin, begin + slices.tokens)
            sliced = {name: given[name][part, columns] for name in scan.rows}
            changed = {scan.initial: state, scan.returns_state: True, "chunk_size": slices.chunk}
            piece, view = function(**given | sliced | changed)
            state = view.clone()  # a view of the states after all chunks
            if output is None:
                output = piece.new_empty(batch, length, *piece.shape[2:])
                last = state.new_empty(batch, *state.shape[1:])
            output[part, columns] = piece
            del piece, view  # before the next slice is run
        last[part] = state
    if given[scan.returns_state]:
        return output, last
    return (output, None) if scan is _DELTA else output


def _run_channels(scan: ChannelScan, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Run slices of rows, and of channels where one row is too large."""
    batch, inner = given["hidden_states"].shape[:2]
    rows, channels = _channel_slices(given)
    if rows >= batch and channels >= inner:
        return function(**given)
    output: Any = None
    state: Any = None
    for row, channel in itertools.product(range(0, batch, rows), range(0, inner, channels)):
        lines, columns = slice(row, row + rows), slice(channel, channel + channels)
        sliced = {name: given[name][lines, columns] for name in scan.both if given[name] is not None}
        sliced |= {name: given[name][lines] for name in scan.rows}
        sliced |= {name: given[name][columns] for name in scan.channels if given[name] is not None}
        piece, last = function(**given | sliced | {"return_last_state": True})
        if output is None:
            output = piece.new_empty(batch, inner, *piece.shape[2:])
            state = last.new_empty(batch, inner, *last.shape[2:])
        output[lines, columns], state[lines, columns] = piece, last
        del piece, last  # before the next slice is run
    return (output, state) if given["return_last_state"] else output


def _channel_slices(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and channels of a slice."""
    batch, inner = given["hidden_states"].shape[:2]
    channel = _channel_bytes(given)
    return max(1, min(batch, MOST_BYTES // (channel * inner))), max(1, min(inner, MOST_BYTES // channel))


def _channel_bytes(given: Mapping[str, Any]) -> int:
    """Return the bytes of one channel: of every token and state a decay, a rate, an input and a product."""
    return 4 * max(4, given["A"].element_size()) * given["hidden_states"].shape[2] * given["A"].shape[1]  # type: ignore[no-any-return]


def _chunk_slices(
    scan: ChunkScan, function: Callable[..., Any], given: Mapping[str, Any], device: torch.device
) -> Slices:
    """Return slices within the bound of a device: all at once, else as many tokens as possible."""
    most, most_chunks = (CACHED_BYTES, MOST_CHUNKS) if device.type == "cpu" else (MOST_BYTES, sys.maxsize)
    batch, length = given[scan.rows[0]].shape[:2]
    chunk = given["chunk_size"]
    while chunk > LEAST_CHUNK and _row_bytes(scan, function, given, 1, chunk) > most:
        chunk //= 2
    chunks, needed = 1, min(-(-length // chunk), most_chunks)
    while chunks < needed and _row_bytes(scan, function, given, 2 * chunks, chunk) <= most:
        chunks *= 2
    row = _row_bytes(scan, function, given, chunks, chunk)
    rows = max(1, min(batch, most // row))
    if chunks > needed:  # between two sizes that are measured already
        half = chunks // 2
        below = _row_bytes(scan, function, given, half, chunk)
        row = below + (row - below) * (needed - half) // (chunks - half)
    return Slices(rows, chunks * chunk, chunk, rows * row)


def _row_bytes(scan: ChunkScan, function: Callable[..., Any], given: Mapping[str, Any], chunks: int, chunk: int) -> int:
    """Return the peak of one row of some chunks, measured on ``meta`` tensors once for each kind of layer."""
    shapes = tuple((name, given[name].shape[2:], given[name].dtype) for name in scan.rows)
    key = function, shapes, chunks, chunk
    if key not in _peaks:
        changed: dict[str, Any] = {
            name: torch.empty(1, chunks * chunk, *shape, dtype=dtype, device="meta") for name, shape, dtype in shapes
        }
        others = {
            name: one.to("meta") for name, one in given.items() if isinstance(one, Tensor) and name not in changed
        }
        changed |= others | {scan.initial: None, scan.returns_state: True, "chunk_size": chunk}
        with torch.no_grad(), _disable_current_modes():
            _peaks[key] = peak_bytes(lambda: function(**{**given, **changed}))
    return _peaks[key]
