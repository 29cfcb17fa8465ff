"""Whatever is passed to a public name runs, or is refused by a message of ours; nothing has changed by it.

Run: python -m pytest tests/test_odd_values.py -m exhaustive
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.captured import launched
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stree
from stree.drafters import NoDrafter, SuffixDrafter
from stree.growth import RSDS, Calibrated, Chain, SpecInfer, Static
from stree.retrieval import Datastore
from stree.serving import RequestHandle

INTEGERS = [-(1 << 70), -1, 0, 1, 2, 3, 1 << 40, 1 << 70]
FLOATS = [-1.0, 0.0, 0.5, 2.5, float("nan"), float("inf")]
SCALARS = st.sampled_from(
    [None, True, False, *INTEGERS, *FLOATS, "", "x", "auto", b"a", 1j, ..., object, object(), len, torch.float32]
)
TENSORS = st.sampled_from(
    [
        torch.tensor(1), torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor([[1, 2]]), torch.zeros(2, 2),
        torch.zeros(0), np.int64(2), np.float32(1.5), np.array([1, 2]), np.array([]),
    ]
)  # fmt: skip
ODD = st.one_of(
    SCALARS, TENSORS,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.just("a"), inner),
        max_leaves=4,
    ),
)  # fmt: skip
TREE = stree.TokenTree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 0]))
# Messages of Python, torch and numpy for a value that was not checked before.
UNSEEN = re.compile(
    r"object (is not|has no|cannot be)|unsupported operand|not supported between|has no len|unhashable|ambiguous|"
    r"0-d tensor|invalid literal|must be str, not|too large to convert|missing \d"
)
OUR_FILES = str(Path(stree.__file__).resolve().parents[1])


def state_of(prompt: list[int], *, is_verified: bool = False) -> Any:
    state = lm().new_state(1, 64, 16)
    lm().prefill(state, torch.tensor([prompt]))
    if is_verified:
        lm().verify(state, TREE)
    return state


@cache
def lm() -> stree.TreeLM:
    return launched()


@cache
def engine() -> stree.Engine:
    return stree.Engine(launched(), NoDrafter(), max_batch=1, max_length=64)


def generated(**options: Any) -> Any:
    return stree.generate(lm(), **options).sequences


def submitted(**options: Any) -> Any:
    handle: RequestHandle = engine().submit(**options)
    return handle.result(30).sequences


TEXT = {"sampling": stree.Sampling(), "max_new_tokens": 2, "seed": 0, "stop_token_ids": None, "stop_strings": None}
TEXT |= {"tokenizer": None, "ignore_eos": False, "logprobs": False}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "generate": (
        generated,
        {
            **TEXT, "prompts": [[1, 2, 3]], "growth": None, "budget": 2, "overlap": False, "repetition_penalty": 1.0,
            "logits_processor": None, "num_samples": 1, "return_steps": False, "attention_mask": None,
            "streamer": None, "cancelled": None, "max_batch": None, "max_length": None, "allow_lossy": False,
        },
    ),
    "submit": (submitted, {**TEXT, "prompt": [1, 2, 3], "trees": False}),
    "Sampling": (stree.Sampling, {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}),
    "TokenTree": (stree.TokenTree, {"tokens": [1, 2], "parents": [-1, 0]}),
    "chain": (stree.TokenTree.chain, {"tokens": [1, 2]}),
    "from_paths": (stree.TokenTree.from_paths, {"paths": [[1, 2]]}),
    "Datastore.build": (Datastore.build, {"documents": [[1, 2]], "vocab_size": 10, "max_tokens": 100}),
    "Datastore.load": (Datastore.load, {"path": "nowhere"}),
    "prefill": (
        lambda **given: lm().prefill(lm().new_state(1, 64, 16), **given),
        {"input_ids": torch.tensor([[1, 2]]), "lengths": None},
    ),
    "extend": (
        lambda **given: lm().extend(state_of([1, 2]), **given), {"input_ids": torch.tensor([[1, 2]]), "lengths": None}
    ),
    "verify": (lambda **given: lm().verify(state_of([1, 2]), **given), {"tree": TREE, "first": 0}),
    "commit": (
        lambda **given: lm().commit(state_of([1, 2], is_verified=True), **given),
        {"path": torch.tensor([[0, 1]], dtype=torch.int32), "path_lengths": torch.tensor([2], dtype=torch.int32)},
    ),
    "SuffixDrafter": (SuffixDrafter, {"datastore": None, "min_match": 2}),
    "Chain": (Chain, {"depth": 3}),
    "Static": (Static, {"shape": [2, 1]}),
    "SpecInfer": (SpecInfer, {"widths": [2, 1]}),
    "RSDS": (RSDS, {"width": 2, "depth": 2}),
    "Calibrated": (Calibrated, {"depth": 4, "ranks": 4}),
}  # fmt: skip
ARGUMENTS = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_any_value_runs_or_is_refused_by_a_message_of_ours(name: str, argument: str) -> None:
    call, arguments = CALLS[name]

    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(value=ODD)
    def check(value: Any) -> None:
        try:
            call(**{**arguments, argument: value})
        except (TypeError, ValueError, NotImplementedError, stree.GenerationError) as error:
            assert not UNSEEN.search(str(error)), f"{name}({argument}={value!r}): {error!r}"

    check()
    if name in ("generate", "submit"):
        assert call(**arguments) == generated(**CALLS["generate"][1]), "nothing has changed by it"
