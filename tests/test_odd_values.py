"""Whatever is passed to a public name runs, or is refused by a message that names it; nothing has changed by it.

Run: STREE_CASES=5000 python -m pytest tests/test_odd_values.py -m slow
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.public_calls import CALLS, OUTPUTS, TREE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stree
from stree.drafters import SuffixDrafter
from stree.growth import Chain

MODULES = (stree, stree.drafters, stree.growth, stree.heads, stree.testing, stree.verify)
INTEGERS = [-(1 << 70), -1, 0, 1, 2, 3, 1 << 40, 1 << 70]
FLOATS = [-1.0, 0.0, 0.5, 2.5, float("nan"), float("inf")]
SCALARS = st.sampled_from(
    [None, True, False, *INTEGERS, *FLOATS, "", "x", "auto", b"a", 1j, ..., object, object(), len, torch.float32]
)
OBJECTS = st.sampled_from(
    [
        torch.tensor(1), torch.tensor(1.5), torch.tensor([1, 2]), torch.tensor([[1, 2]]), torch.zeros(2, 2),
        torch.zeros(0), np.int64(2), np.float32(1.5), np.array([1, 2]), np.array([]), TREE, stree.Sampling(1.0),
        SuffixDrafter(), Chain(2), Chain,
    ]
)  # fmt: skip
ODD = st.one_of(
    SCALARS, OBJECTS,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.just("a"), inner),
        max_leaves=4,
    ),
)  # fmt: skip
# Messages of Python, torch and numpy for a value that was not checked before.
UNSEEN = re.compile(
    r"object (is not|has no|cannot be)|unsupported operand|not supported between|has no len|unhashable|ambiguous|"
    r"0-d tensor|invalid literal|must be str, not|too large to convert|missing \d|not callable|positional argument|"
    r"not iterable"
)
# Other words for an argument, in messages about all of it or a part.
WORDS = {
    "tokens": "tree", "parents": "tree", "documents": "document|datastore", "path": "datastore",
    "first": "FusedDrafter", "second": "FusedDrafter", "source": "drafter|checkpoint|name_or_path", "pattern": "regex",
    "grammar": "lark", "name_or_path": "checkpoint", "shape": "Static", "max_new_tokens": "new ones", "seed": "model",
    "growth": "tree of", "drafter": "checkpoint|name_or_path", "logits_processor": "len", "text": "growth",
    "allowed_token_ids": "vocabulary", "lm": "ModelDrafter", "vocab_size": "vocabulary|verifier", "seeds": "verifier",
    "budget": "nodes", **dict.fromkeys(("device_map", "tp_plan", "dtype", "device"), "checkpoint|name_or_path"),
}  # fmt: skip
ARGUMENTS = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]
CASES = -(-int(os.environ.get("STREE_CASES", "500")) // len(ARGUMENTS))  # of each argument


def test_every_public_name_is_called() -> None:
    names = {name for module in MODULES for name in module.__all__ if callable(getattr(module, name))}
    called = {part for name in CALLS for part in re.split(r"[., ]+", name)}
    assert names - called == OUTPUTS


def shown(result: Any) -> str:
    """A result as text, without addresses."""
    return re.sub("0x[0-9a-f]+", "", repr(result.tolist() if isinstance(result, torch.Tensor) else result))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_any_value_runs_or_is_refused_by_a_message_that_names_it(name: str, argument: str) -> None:
    call, arguments = CALLS[name]
    named = re.compile(f"{argument.rstrip('s')}|{WORDS.get(argument, argument)}")

    def result() -> str:
        try:
            return shown(call(**arguments))
        except (TypeError, ValueError) as error:  # of a call that needs what no test has, such as a checkpoint
            return str(error)

    expected = result()

    @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(value=ODD)
    def check(value: Any) -> None:
        try:
            call(**{**arguments, argument: value})
        except (TypeError, ValueError) as error:
            said = str(error)
            assert named.search(said) and not UNSEEN.search(said), f"{name}({argument}={value!r:.80}): {error!r}"

    check()
    assert result() == expected, "nothing has changed by it"
