"""One decoding step of a pair of models on meta tensors: every launch happens, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import stree
from stree.decode.step import DecodeStep
from stree.drafters import ModelDrafter
from stree.growth import Calibrated
from stree.kernels import dispatch, topology
from stree.models import patched_model, tree_lm
from stree.sampling import Random, Sampling

META = torch.device("meta")


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Make "auto" mean Triton on any device, and derive the indices of a tree once a step in Triton kernels."""

    def has_triton(op: str, device: torch.device, dtype: torch.dtype) -> bool:
        return op in dispatch.TRITON and dtype != torch.float64

    with ExitStack() as patched:
        for owner, name, value in (
            (dispatch, "has_triton", has_triton),
            (patched_model, "has_triton", has_triton),
            (topology, "launches_always", True),
            (topology, "waits_always", True),
        ):
            patched.enter_context(mock.patch.object(owner, name, value))
        yield


def begun(
    target: stree.TreeLM, draft: stree.TreeLM, nodes: int, depth: int, temperature: float
) -> tuple[DecodeStep, Callable[[], None]]:
    """Prepare a step at fixed shapes, one sequence.

    Args:
        target: on the meta device, as is ``draft``.
        draft: the draft model.
        nodes: of the tree, root included.
        depth: most draft calls.
        temperature: of target and draft.

    Returns:
        The program, and a function that runs its next step.
    """
    growth = Calibrated(depth).bind(Sampling(temperature))
    zero = torch.zeros(1, dtype=torch.long, device=META)
    state = target.new_state(1, 512, nodes, fixed_shapes=True)
    rng = Random(zero[0], zero, zero)
    program = DecodeStep(target, state, rng, sampling=growth.sampling, verifier="auto", stop_token_ids=[1])
    with mock.patch.object(tree_lm.TreeLM, "prefill", _prefill):
        program.fill(ModelDrafter(draft), [[5, 6, 7]], 400, 0)
        run: Any = program.run
        run.reserve(512, growth, nodes, begins=True)
        program.begin(0, 3, is_finished=False)

    def step() -> None:
        with suppress(NotImplementedError):  # the report is copied to the host last, which meta tensors cannot be
            program(growth, nodes)

    return program, step


def _prefill(lm: stree.TreeLM, state: Any, input_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    state.length_bound = input_ids.shape[1]
    return torch.empty(len(input_ids), lm.vocab_size, device=META)
