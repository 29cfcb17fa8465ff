"""Targets whose steps are captured on the CPU, on a tape in the place of CUDA graphs.

Operators are noted with their tensors, and run again on the same memory. As on a GPU, capturing changes nothing, host
code does not run again, nothing may be read or brought from the host, memory that was freed after a capture must not be
used by it, and what a replay made is gone with the next of its pool. This is the one place that knows where the library
keeps what it has captured and how it decides that it can.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import stree
from helpers.on_device import NoHostReads, treat_as_on_device
from helpers.tiny_models import patched, random_texts, tiny_model
from stree.decode import step_cache as step_cache
from stree.decode.cuda_graphs import GraphPools
from stree.drafters import ModelDrafter


class TapeError(RuntimeError):
    """What a CUDA graph could not hold, or would do wrong."""


class Tape(TorchDispatchMode):
    """One captured graph: operators in the order of their calls."""

    def __init__(self, recorder: TapeRecorder, *, separate_pool: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._separate_pool = recorder, separate_pool
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._own: set[int] = set()  # storages made while recording
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage, a view of all of it and what it held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "lift_fresh":  # a number put into a slice, which a device's kernel is given
            self._own |= {_place(tensor) for tensor in _tensors(args)}
        for tensor in _written(func, args, kwargs):
            self._save(tensor)
        out = func(*args, **kwargs)
        taken = {_place(tensor) for tensor in _tensors((args, kwargs))}
        made = [tensor for tensor in _tensors(out) if _place(tensor) not in taken]
        self._own |= {_place(tensor) for tensor in made}
        self._calls.append((func, args, kwargs, made))
        return out

    def undo(self) -> None:
        """Put back what the recorded run has overwritten; count who holds what it did not make."""
        for whole, held in self._before.values():
            whole.copy_(held)
        self._before.clear()
        self._sort()

    @torch.no_grad()
    def replay(self) -> None:
        """Run everything again, where others of its pool had their memory."""
        with self._recorder.alone():
            self._run_again()

    def _run_again(self) -> None:
        self._look_for_freed()
        for other in self._recorder.tapes:
            if other is not self and other._separate_pool == self._separate_pool:
                other._spoil()
        for func, args, kwargs, made in self._run:
            out = func(*args, **kwargs)
            fresh = _tensors(out)
            for old, new in zip(made, fresh if len(fresh) == len(made) else [], strict=bool(made)):
                old.copy_(new)

    def _sort(self) -> None:
        """Sort what was captured once, as every replay needs it."""
        self._run = [call for call in self._calls if call[3] or _written(*call[:3])]  # others are views
        self._times = dict[int, int]()  # that the tape holds each tensor
        self._held = dict[int, dict[int, Tensor]]()  # by storage, the tensors in memory that it did not allocate
        self._memory = dict[int, Tensor]()  # by storage, that which it allocated
        for _, args, kwargs, made in self._calls:
            for tensor in made:
                if _place(tensor) in self._own:
                    self._memory[_place(tensor)] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            for tensor in [*_tensors((args, kwargs)), *made]:
                self._times[id(tensor)] = self._times.get(id(tensor), 0) + 1
                if _place(tensor) not in self._own:
                    self._held.setdefault(_place(tensor), {})[id(tensor)] = tensor

    def _spoil(self) -> None:
        """Leave nothing of the last run."""
        for memory in self._memory.values():
            memory.fill_(0xA5)

    def _save(self, tensor: Tensor) -> None:
        """Keep what a storage holds before the first write to it."""
        place = _place(tensor)
        if place not in self._own and place not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[place] = whole, whole.clone()

    def _look_for_freed(self) -> None:
        """Fail if only the tape holds memory that it did not allocate."""
        for tensors in self._held.values():
            views = [*tensors.values()]
            storage = views[0].untyped_storage()
            others = torch._C._storage_Use_Count(storage._cdata) - len(views) - 1
            # Beside the tape, two collections here and the argument of getrefcount hold a tensor.
            if others <= 0 and all(
                sys.getrefcount(views[i]) <= self._times[id(views[i])] + 3 for i in range(len(views))
            ):
                raise TapeError(f"a replayed step uses memory that was freed, once a tensor {[*views[0].shape]}")


class _NothingFromTheHost(TorchFunctionMode):
    """Fail where numbers of the host are made a tensor, for which a device would wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            raise TapeError(f"a captured step brings numbers from the host by {func.__name__}")
        return func(*args, **(kwargs or {}))


class TapeRecorder:
    """Records tapes where a device would record CUDA graphs.

    As torch does, it refuses a pool whose graphs are all gone, and two threads that capture or replay at a time.

    Args:
        renews_pools: whether it takes a new pool then, as our recorder does.
    """

    def __init__(self, *, renews_pools: bool = True) -> None:
        self.lock, self._busy = threading.RLock(), threading.Lock()
        self._pools = GraphPools(object if renews_pools else lambda: 0)
        self._in_pool: dict[Any, weakref.WeakSet[Tape]] = {}  # by handle

    @property
    def tapes(self) -> list[Tape]:
        """The tapes that somebody keeps."""
        return [tape for tapes in self._in_pool.values() for tape in tapes]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Fail where another thread captures or replays meanwhile."""
        if not self._busy.acquire(blocking=False):
            raise TapeError("two threads capture or replay at the same time")
        try:
            yield
        finally:
            self._busy.release()

    def capture(self, work: Callable[[], Any], *, separate_pool: bool = False) -> tuple[Tape, Any]:
        """Record work and undo it."""
        tape, pool = Tape(self, separate_pool=separate_pool), self._pools.handle(separate_pool)
        if not self._in_pool.get(pool, {None}):
            raise TapeError("all graphs of this pool are gone: torch asserts where it is captured into again")
        try:
            with self.alone(), NoHostReads(), _NothingFromTheHost(), tape:
                out = work()
        finally:
            tape.undo()
        self._in_pool.setdefault(pool, weakref.WeakSet()).add(tape)
        self._pools.add(tape, separate_pool)
        return tape, out

    def allocated(self) -> int:
        """Count nothing."""
        return 0


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors in memory of torch's: weights in oneDNN's layout, which no device has, are left out."""
    if isinstance(value, Tensor):
        return [] if value.is_mkldnn else [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """List the tensors that an operator writes."""
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    return written


TEXTS = random_texts(random.Random(0), [6, 9])


def captured(monkeypatch: pytest.MonkeyPatch, lm: stree.TreeLM | None = None) -> stree.TreeLM:
    """Give a target, by default a tiny Bamba, whose steps are captured, with the operators that a device would run."""
    # A capture needs CUDA, and no option may say otherwise to a user.
    treat_as_on_device(monkeypatch)
    monkeypatch.setattr(
        step_cache, "_can_capture", lambda lm: "step_cache" in lm.cache and lm.captures_steps is not False
    )
    lm = patched(tiny_model("bamba")) if lm is None else lm
    lm.cache["step_cache"] = step_cache.StepCache(TapeRecorder())
    return lm


def launched() -> stree.TreeLM:
    """Give the same target, whose steps are launched one by one."""
    return patched(tiny_model("bamba"))


@cache
def near_drafter() -> ModelDrafter:
    """Give a draft model near the target, so that what it drafts is accepted often, and not always."""
    model = copy.deepcopy(tiny_model("bamba"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return ModelDrafter(stree.TreeLM(model))


def generate(lm: stree.TreeLM, drafter: Any, **options: Any) -> stree.Generation:
    """Generate 14 tokens after each of two short texts."""
    return stree.generate(lm, options.pop("texts", TEXTS), drafter, **{"max_new_tokens": 14, **options})
