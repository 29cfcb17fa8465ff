"""One decoding step of a pair of models on meta tensors: every launch happens, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import stree
from stree.decode.request import Request
from stree.decode.step import DecodeStep
from stree.drafters import ModelDrafter
from stree.growth import Growth
from stree.kernels import dispatch
from stree.models import tree_lm
from stree.sampling import BatchSampling, Sampling

META = torch.device("meta")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let "auto" mean Triton on any device, for all operations."""
    with dispatch.as_on_device(operations=dispatch.TRITON):
        yield


def begun(
    target: stree.TreeLM, draft: stree.TreeLM, nodes: int, growth: Growth | None, temperature: float, *,
    verifier: str = "auto", batch: int = 1,
) -> tuple[DecodeStep, Callable[[], None]]:  # fmt: skip
    """Prepare a step at fixed shapes.

    Args:
        target: on the meta device, as is ``draft``.
        draft: the draft model.
        nodes: of the tree, root included.
        growth: of the draft trees; None for plain decoding.
        temperature: of target and draft.
        verifier: see ``stree.accept``.
        batch: number of sequences.

    Returns:
        The program, and a function that runs its next step.
    """
    sampling = Sampling(temperature)
    state = target.new_state(batch, 512, nodes, fixed_shapes=True)
    samplings = BatchSampling([sampling] * batch, batch, META)
    program = DecodeStep(target, state, sampling=samplings, verifier=verifier, max_length=512, most_stops=1)
    with mock.patch.object(tree_lm.TreeLM, "prefill", _prefill):
        program.fill(ModelDrafter(draft), [Request([5, 6, 7], sampling, 400, frozenset([1]))] * batch)
        program.reserve(512, growth, nodes, begins=True)
        for row in range(batch):
            program.set_finished(row, is_finished=False)

    def step() -> None:
        with suppress(NotImplementedError):  # the report is copied to the host last, which meta tensors cannot be
            program(growth, nodes)

    return program, step


def _prefill(lm: stree.TreeLM, state: Any, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    state.length_bound = input_ids.shape[1]
    return torch.empty(len(input_ids), lm.vocab_size, device=META)
