"""Tensors that are made once: all threads get one object, which lives as long as the process."""

from __future__ import annotations

import time

import torch
from helpers.together import together
from torch import Tensor

from stree.kernels.constants import constant


def test_threads_that_make_a_constant_at_once_get_one_object() -> None:
    @constant
    def zeros(size: int) -> Tensor:
        time.sleep(0.05)  # so that every thread begins before one has made it
        return torch.zeros(size)

    found = together(lambda number: zeros(3 + number % 2), 4)
    assert found[0] is found[2] and found[1] is found[3] and [len(one) for one in found[:2]] == [3, 4]
    assert zeros(3) is found[0]
