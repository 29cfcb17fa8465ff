"""What is compiled while a text is decoded is reported apart from its time."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
from helpers.captured import TEXTS, launched

import stree
from stree.kernels.clock import compiling


class Waiting:
    """A streamer that takes a while over every token."""

    def __init__(self, is_compiling: bool) -> None:
        self.is_compiling = is_compiling

    def put(self, value: Any) -> None:
        with compiling() if self.is_compiling else nullcontext():
            time.sleep(0.1)

    def end(self) -> None:
        pass


def test_compilation_is_reported_apart_from_the_time_of_a_text() -> None:
    began = time.perf_counter()
    stats = stree.generate(launched(), [TEXTS[0]], streamer=Waiting(True), max_new_tokens=3, ignore_eos=True).stats
    wall_s = time.perf_counter() - began
    assert stats["warm_up_s"] >= 0.3
    assert stats["total_s"] <= wall_s - stats["warm_up_s"]
    assert stats["tokens_per_s"] == pytest.approx(3 / stats["total_s"])
    assert sum(stats[part] for part in ("prefill_s", "draft_s", "verify_s", "accept_s", "commit_s")) <= stats["total_s"]
    stats = stree.generate(launched(), [TEXTS[0]], streamer=Waiting(False), max_new_tokens=3, ignore_eos=True).stats
    assert stats["warm_up_s"] < 0.3 <= stats["total_s"]
