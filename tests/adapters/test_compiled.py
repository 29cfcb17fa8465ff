"""Compiled scoring of trees against the same model without compilation."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import BUILDERS, family_model, matrix
from helpers.tiny_models import tiny_model
from torch import Tensor

import stree
from benchmarks import ROOT
from stree.models.tree_lm import TreeLM

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5]


SIZES = ((0, 1), (0, 4), (3, 8), (2, 9), (5, 6))  # nodes below the first that runs, and all nodes


def _steps(
    lm: TreeLM, compiled: bool, sizes: Any = SIZES, change: Callable[[TreeLM], None] = lambda lm: None
) -> list[Tensor]:
    """Return the logits of trees of several sizes, each extended and committed, from states of two sizes."""
    torch.manual_seed(0)
    found = []
    if compiled:
        lm.compile()
    for max_length, max_nodes in ((61, 12), (97, 15)):
        state = lm.new_state(1, max_length, max_nodes)
        found.append(lm.prefill(state, torch.randint(lm.vocab_size, (1, 7))))
        for first, n in sizes:
            tokens, parents = torch.randint(lm.vocab_size, (1, n)), torch.tensor([PARENTS[:n]], dtype=torch.int32)
            if first:
                lm.verify(state, stree.TokenTree(tokens[:, :first], parents[:, :first]))
            found.append(lm.verify(state, stree.TokenTree(tokens, parents), first=first))
            path = torch.tensor([[0, 1, 3]], dtype=torch.int32)
            lm.commit(state, path[:, :n], torch.tensor([min(n, 2)], dtype=torch.int32))
        change(lm)
    return found


def _check(build: Callable[[], Any], bound: float = 1e-5, **options: Any) -> None:
    wanted, found = (_steps(stree.TreeLM(build().eval()), compiled, **options) for compiled in (False, True))
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=bound * float(one.abs().max()))


def _add_hook(lm: TreeLM) -> None:
    lm.model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output * 3)


@pytest.mark.slow
def test_compiled_trees_of_all_sizes_have_the_logits_of_the_model() -> None:
    _check(partial(tiny_model, "mamba2"), sizes=((0, 4), (0, 7)))


@pytest.mark.slow
def test_compiled_trees_in_bfloat16_have_the_logits_of_the_model() -> None:
    _check(partial(tiny_model, "mamba2", torch.bfloat16), bound=2**-4, sizes=((0, 1), (0, 4)))


@pytest.mark.slow
def test_states_and_trees_of_other_sizes_share_a_compiled_function(traced_only: None) -> None:
    lm = stree.TreeLM(tiny_model("mamba2", torch.float32))
    lm.compile()
    seconds = []
    for max_length, max_nodes, n in ((61, 12, 4), (97, 15, 7)):
        state = lm.new_state(1, max_length, max_nodes)
        lm.prefill(state, torch.tensor([[1, 2, 3]]))
        lm.verify(state, stree.TokenTree(torch.ones(1, n, dtype=torch.long), torch.tensor([PARENTS[:n]]).int()))
        seconds.append(lm.compile_s)
    assert seconds[0] == seconds[1] > 0


def _logits(lm: TreeLM, batch: int, first: int, n: int, max_nodes: int, max_length: int) -> Tensor:
    """Return the logits of nodes ``first``.. of a chain of n nodes behind prompts."""
    torch.manual_seed(0)
    state = lm.new_state(batch, max_length, max_nodes)
    lm.prefill(state, torch.randint(lm.vocab_size, (batch, 5)))
    chain = stree.TokenTree.chain(torch.randint(lm.vocab_size, (batch, n)))
    if first:
        is_compiled, lm.is_compiled = lm.is_compiled, False  # of two calls one is looked at
        lm.verify(state, stree.TokenTree(chain.tokens[:, :first], chain.parents[:, :first]))
        lm.is_compiled = is_compiled
    return lm.verify(state, chain, first)


# Batch, first node, nodes, max_nodes, max_length: sizes that meet those of an example of 13 rows, 17 nodes, room for 19
# nodes and 311 tokens, alone and together.
MEETINGS = [
    (batch, *tree, max_length)
    for batch in (13, 17, 19)
    for tree in ((0, 4, 12), (0, 17, 19), (0, 19, 19), (3, 7, 12), (4, 17, 19), (6, 19, 23), (6, 19, 19))
    for max_length in (61, 311)
]


def _check_sizes(lm: TreeLM, sizes: Sequence[tuple[int, int, int, int, int]], caplog: Any) -> None:
    """Require that calls of these sizes are compiled one after the other, and right."""
    other = stree.TreeLM(copy.deepcopy(lm.model))
    lm.compile()
    with caplog.at_level(logging.WARNING, "stree"):
        for one in sizes:
            wanted = _logits(other, *one)
            torch.testing.assert_close(_logits(lm, *one), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
            assert lm.compile_s
    assert not [record.message for record in caplog.records if record.name == "stree"]


@pytest.mark.parametrize(
    "sizes", slow_unless(lambda _: False, [(case,) for case in MEETINGS], in_ci=(17, 0, 4, 12, 61).__eq__), ids=str
)
def test_no_size_is_taken_for_one_of_the_traced_example(
    sizes: tuple[int, int, int, int, int], traced_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    _check_sizes(stree.TreeLM(tiny_model("mamba2", num_hidden_layers=1)), [sizes, (2, *sizes[1:])], caplog)


@pytest.mark.parametrize("heads", slow_unless(lambda _: False, [13, 17, 19], in_ci=(17).__eq__))
def test_no_size_of_the_model_is_taken_for_one_of_the_traced_example(
    heads: int, traced_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", hidden_size=2 * heads, num_attention_heads=heads, num_key_value_heads=heads)
    _check_sizes(stree.TreeLM(model), [(heads, 2, 5, 12, 61), (1, 0, 12, 12, 61)], caplog)


@pytest.mark.slow
def test_trees_of_one_node_are_compiled_where_those_of_several_cannot_be(
    traced_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    lm = stree.TreeLM(family_model("falcon_mamba"))
    lm.compile()
    with caplog.at_level(logging.WARNING, "stree"):
        _logits(lm, 1, 0, 6, 8, 61)
        refused_s = lm.compile_s
        _logits(lm, 3, 0, 6, 8, 61)
        assert lm.compile_s == refused_s  # no second try
        _logits(lm, 1, 0, 1, 8, 61)
        assert lm.compile_s > refused_s
    messages = [record.message for record in caplog.records if record.name == "stree"]
    assert [message.partition(":")[0] for message in messages] == ["trees of several nodes are run without compilation"]


@pytest.mark.parametrize("family", slow_unless(lambda _: False, ["bamba", "olmo_hybrid"], in_ci=lambda _: False))
def test_compiled_trees_of_other_families(family: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = BUILDERS[family]()
    with caplog.at_level(logging.WARNING, "stree"):
        _check(lambda: copy.deepcopy(model))
    assert not [record for record in caplog.records if record.name == "stree"]  # else they were not compiled


@pytest.mark.slow
@pytest.mark.parametrize("family", matrix(fast=["bamba"]))
def test_compiled_commits_leave_the_states_that_others_leave(
    family: str, traced_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    lm = stree.TreeLM(family_model(family))
    tree = stree.TokenTree(torch.randint(lm.vocab_size, (2, 6)), torch.tensor([PARENTS[:6]] * 2, dtype=torch.int32))
    eager = lm.new_state(2, 40, 8)
    lm.prefill(eager, torch.randint(lm.vocab_size, (2, 9)))
    for path, lengths in (([[0], [0]], [1, 0]), ([[0, 1, 3], [0, 2, 0]], [3, 2]), ([[0, 1], [0, 2]], [0, 2])):
        compiled = eager.clone()
        for state in (eager, compiled):
            lm.verify(state, tree)
        lm.commit(eager, torch.tensor(path).int(), torch.tensor(lengths).int())
        with caplog.at_level(logging.WARNING, "stree"):
            lm.is_compiled = True  # its linear layers are not packed, and trees are scored as before
            lm.commit(compiled, torch.tensor(path).int(), torch.tensor(lengths).int())
            lm.is_compiled = False
        assert lm.compile_s > 0 and compiled.lengths.tolist() == eager.lengths.tolist()
        for one, other in zip(eager.stack_tensors, compiled.stack_tensors, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-5 * max(float(one.abs().max()), 1.0))
    assert not [record for record in caplog.records if record.name == "stree"]  # else they were not compiled


@pytest.mark.slow
def test_a_hook_that_is_added_reaches_compiled_trees(traced_only: None) -> None:  # as do weights: test_threads.py
    _check(partial(tiny_model, "mamba2", num_hidden_layers=1), sizes=((0, 4),), change=_add_hook)


OTHER_PROCESS = """
import copy, json, logging, sys
import torch
from helpers.tiny_models import tiny_model
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm
import stree
from stree.models.compiled_function import CompiledFunction

seed, scale = int(sys.argv[1]), float(sys.argv[2])
compiled, compile, messages, errors = [], CompiledFunction.compile, [], []
CompiledFunction.compile = lambda kind, *rest, **more: compiled.append(str(kind)) or compile(kind, *rest, **more)
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("stree").addHandler(handler)
if scale != 1:  # a change in memory
    norm = Mamba2RMSNorm.forward
    Mamba2RMSNorm.forward = lambda self, x: scale * norm(self, x)
model = tiny_model("mamba2", num_hidden_layers=1)
with torch.no_grad():
    model.get_output_embeddings().weight.mul_(seed)
lms = stree.TreeLM(copy.deepcopy(model)), stree.TreeLM(model)
lms[1].compile()
for lm in lms:
    state = lm.new_state(1, 64, 8)
    lm.prefill(state, torch.tensor([[1, 2, 3]]))
    found = []
    for token in (4, 5):
        found.append(lm.verify(state, stree.TokenTree.chain([token])))
        lm.commit(state, torch.tensor([[0]]), torch.tensor([1]))
    errors.append(torch.stack(found))
error = float((errors[0] - errors[1]).abs().max() / errors[0].abs().max())
print(json.dumps({"compiled": compiled, "messages": messages, "error": error}))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_later_processes_load_what_one_has_compiled_unless_the_model_has_other_code(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for seed, scale in ((1, 1), (2, 1), (1, 3), (1, 1)):
        if len(found) == 3:
            _damage(sorted(tmp_path.rglob("stree/*/*.json")))
        done = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, str(seed), str(scale)], capture_output=True, text=True, timeout=500,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
        assert found[-1]["error"] < 1e-5
    first, other_weights, other_code, damaged = found
    assert len(first["compiled"]) == 2 and other_weights["compiled"] == []  # a score and a commit
    assert first["messages"] == other_weights["messages"] == []
    assert len(other_code["compiled"]) == 1 and "differs from the model" in other_code["messages"][0]
    assert len(damaged["compiled"]) == 2 and damaged["messages"] == []


def _damage(files: list[Path]) -> None:
    """Take a weight's name out of one function's record, and a byte out of the other's artifact."""
    record = json.loads(files[0].read_text())
    files[0].write_text(json.dumps({**record, "names": record["names"][:-1]}))
    for file in files[1:]:
        binary = file.with_suffix(".bin")
        binary.write_bytes(binary.read_bytes()[:-1])


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_says_so_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    lm = stree.TreeLM(tiny_model("mamba2", torch.float32))
    lm.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: output * (2.0 if float(output.detach().sum()) > 1e9 else 1.0)
    )
    lm.compile()
    state = lm.new_state(1, 32, 4)
    lm.prefill(state, torch.tensor([[1, 2, 3]]))
    tree = stree.TokenTree.chain([1, 2])
    with caplog.at_level(logging.WARNING, "stree"):
        logits = lm.verify(state, tree)
        lm.verify(state, tree)
    lm.is_compiled = False
    assert torch.equal(logits, lm.verify(state, tree))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "trees of several nodes are run without compilation"
    ]


def test_sharded_models_are_not_compiled() -> None:
    lm = stree.TreeLM(tiny_model("mamba2", torch.float32))
    lm.is_sharded = True
    with pytest.raises(NotImplementedError, match="only models on the CPU are compiled"):
        lm.compile()
