"""stree.kernels.ops: choice of implementation, and checks of arguments with their messages.

Run: python -m pytest tests/operations/test_ops.py
"""

# Inputs travel as dicts, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc, no-untyped-call"

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.calls import together
from torch import Tensor

from stree.kernels import checks, dispatch, ops
from stree.kernels.topology import AcceptedPath, Topology

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, N = 2, 11


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_trees() -> Tensor:
    return oracles.random_parents(BATCH, N, torch.Generator().manual_seed(0), 1)


# Choice of implementation.


def scan_once(parents: Any, **options: Any) -> Tensor:
    x, state = draw(BATCH, N, 6), draw(BATCH, 6)
    return ops.diagonal_tree_scan(-x.abs(), x, parents, state, **options)


def test_triton_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ops.TRITON, "diagonal_tree_scan", raising=False)
    with pytest.raises(RuntimeError, match="diagonal_tree_scan has no Triton version; those that have one: "):
        scan_once(draw_trees(), backend="triton")
    with pytest.raises(ValueError, match="backend must be 'auto', 'reference' or 'triton', got 'cuda'"):
        scan_once(draw_trees(), backend="cuda")


def test_a_registered_module_serves_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("triton_stub")
    module.diagonal_tree_scan = lambda log_a, x, topology, state, *, first: x[:, first:] + 1
    monkeypatch.setitem(sys.modules, "triton_stub", module)
    monkeypatch.setitem(ops.TRITON, "diagonal_tree_scan", "triton_stub")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert torch.equal(scan_once(draw_trees()), scan_once(draw_trees(), backend="reference"))
    with pytest.raises(RuntimeError, match="backend='triton' needs CUDA tensors, got a tensor on cpu"):
        scan_once(draw_trees(), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert torch.equal(scan_once(draw_trees(), backend="triton"), draw(BATCH, N, 6) + 1)


def test_threads_wait_for_a_module_that_one_of_them_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "import time", "time.sleep(0.2)", "def slow_scan():", "    return 5"
    (tmp_path / "slow_reference.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(dispatch.REFERENCE, "slow_scan", "slow_reference")
    found = together(lambda _: dispatch.choose("slow_scan", "reference", torch.zeros(1))(), 4)
    assert found == [5] * 4


def test_every_exported_operation_has_a_reference() -> None:
    for name in ops.__all__:
        if name.endswith(("_step", "_scan", "_commit", "_conv1d", "_attention")):
            assert callable(dispatch.choose(name, "reference", torch.zeros(1)))


# Bad input: an operation, valid arguments, what is changed of them, and what is said.

x4, state4 = draw(2, 3, 6, 5), draw(2, 6, 5, 7)
dt3, rate, keys = draw(2, 3, 6).abs(), -draw(6).abs(), draw(2, 3, 2, 7)
chain = torch.tensor([[-1, 0, 1]] * 2, dtype=torch.int32)
path3, lengths1 = chain + 1, torch.tensor([3, 3], dtype=torch.int32)
flat, one = draw(2, 3, 6), torch.ones(2, dtype=torch.int32)
query, cache = draw(2, 3, 6, 5), draw(2, 2, 9, 5)
window, weight, angles = draw(2, 6, 3), draw(6), draw(1, 3, 8)
index = torch.zeros(3, 1, dtype=torch.int64)
wide = torch.zeros(1, 16385)
xbc = draw(2, 3, 58)  # of 6 heads of 5 and 2 groups of 7

VALID: dict[str, dict[str, Any]] = {
    "ssd_tree_scan": {"x": x4, "dt": dt3, "A": rate, "B": keys, "C": keys, "parents": chain, "state": state4},
    "ssd_commit": {
        "state": state4.clone(), "x": x4, "dt": dt3, "A": rate, "B": keys, "path": path3, "path_lengths": lengths1,
    },
    "ssd_step": {
        "state": state4.clone(), "stash_xbc": draw(2, 4, 58), "stash_dt": draw(2, 4, 6), "path": None,
        "path_lengths": None, "xbc": xbc, "dt": dt3, "A": rate, "dt_bias": rate, "parents": chain, "headdim": 5,
        "ngroups": 2,
    },
    "gated_delta_tree_scan": {
        "q": keys, "k": keys, "v": x4, "g": -dt3, "beta": dt3, "parents": chain, "state": draw(2, 6, 7, 5),
    },
    "selective_step": {
        "state": draw(2, 6, 7), "stash_x": flat, "stash_dt": dt3, "stash_B": draw(2, 3, 7), "path": None,
        "path_lengths": None, "x": flat, "dt": flat, "A": -draw(6, 7).abs(), "B": draw(2, 3, 7), "C": draw(2, 3, 7),
        "dt_bias": None, "parents": chain,
    },
    "tree_conv1d": {"x": flat, "weight": draw(6, 4), "bias": None, "parents": chain, "window": window},
    "conv_step": {
        "window": window.clone(), "stash": draw(2, 4, 6), "path": None, "path_lengths": None, "x": flat,
        "weight": draw(6, 4), "bias": None, "parents": chain,
    },
    "tree_attention": {
        "q": query, "k_cache": cache, "v_cache": cache, "lengths": one, "k": query[:, :, :2], "v": query[:, :, :2],
        "parents": chain, "scale": 1.0,
    },
    "gated_rms_norm": {"x": flat, "gate": flat, "weight": weight, "eps": 1e-5},
    "rms_norm": {"x": flat, "weight": weight, "eps": 1e-5},
    "rms_norm_add": {"x": flat, "residual": flat, "weight": weight, "eps": 1e-5},
    "rotary": {"q": draw(1, 2, 3, 8), "k": draw(1, 1, 3, 8), "cos": angles, "sin": angles},
    "gated_activation": {"gate": angles[0], "up": None},
    "delta_inputs": {"qk": angles, "b": angles, "key_heads": 2},
    "experts": {"x": draw(3, 16), "index": index, "weights": draw(3, 1), "up": draw(3, 8, 16), "down": draw(3, 16, 4)},
}  # fmt: skip

T = {"backend": "triton"}
MISTAKES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("ssd_tree_scan", {"x": x4[0]}, ValueError, r"x must be \[b, n, h, p\], got float32\[3, 6, 5\]"),
    ("ssd_tree_scan", {"dt": dt3[:, :2]}, ValueError, r"dt must be float\[2, 3, 6\], got float32\[2, 2, 6\]"),
    ("ssd_tree_scan", {"A": rate.long()}, TypeError, r"A must be float\[6\], got int64\[6\]"),
    ("ssd_tree_scan", {"B": draw(2, 3, 4, 7)}, ValueError,
     r"ssd_tree_scan needs that g divides h, got g = 4 of B \[b, n, g, s\] and h = 6 of x \[b, n, h, p\]"),
    ("ssd_tree_scan", {"D": rate[:2]}, ValueError, r"D must be float\[6\], got float32\[2\]"),
    ("ssd_tree_scan", {"D": torch.zeros(6, device="meta")}, ValueError, "D must be on cpu, got meta"),
    ("ssd_tree_scan", {"state": state4.bfloat16()}, TypeError,
     r"state must be float32\[2, 6, 5, 7\], got bfloat16\[2, 6, 5, 7\]"),
    ("ssd_tree_scan", {"x": x4.double()}, TypeError,
     r"state must be float64\[2, 6, 5, 7\], got float32\[2, 6, 5, 7\]"),
    ("ssd_tree_scan", {"parents": chain.long()}, TypeError, r"parents must be int32\[2, 3\], got int64\[2, 3\]"),
    ("ssd_tree_scan", {"parents": chain[0]}, ValueError, r"parents must be int32\[2, 3\], got int32\[3\]"),
    ("ssd_tree_scan", {"parents": chain[:1]}, ValueError, r"parents must be int32\[2, 3\], got int32\[1, 3\]"),
    ("ssd_tree_scan", {"parents": Topology.of(chain[:, :2])}, ValueError,
     r"parents must be int32\[2, 3\], for 3 rows of x, got int32\[2, 2\]"),
    ("ssd_tree_scan", {"parents": chain + 1}, ValueError, r"parents\[:, 0\] must be -1, got \[0, 0\]"),
    ("ssd_tree_scan", {"parents": chain.clone().index_fill_(1, torch.tensor([1]), 2)}, ValueError,
     r"parents\[0, 1\] must be in \[-1, 1\), got 2"),
    ("ssd_tree_scan", {"parents": torch.tensor([[-1, 0, 1], [-1, -1, 1]], dtype=torch.int32)}, ValueError,
     r"parents\[1, 2\] is 1, a padding node; padding has no children"),
    ("ssd_tree_scan", {"first": 3}, ValueError, r"first must be in \[0, 3\) for 3 nodes, got 3"),
    ("ssd_commit", {"path": path3.long()}, TypeError, r"path must be int32\[2, 3\], got int64\[2, 3\]"),
    ("ssd_commit", {"path": path3[:1]}, ValueError, r"path must be int32\[2, 3\], got int32\[1, 3\]"),
    ("ssd_commit", {"path_lengths": None}, ValueError, r"path_lengths must be int32\[2\], got None"),
    ("ssd_commit", {"path_lengths": one[:1]}, ValueError, r"path_lengths must be int32\[2\], got int32\[1\]"),
    ("ssd_commit", {"path": AcceptedPath.of(path3, lengths1)}, ValueError, "path_lengths must be None when path is an"),
    ("ssd_commit", {"A": -draw(2, 5).abs()}, ValueError, r"A must be float\[2, 6\], got float32\[2, 5\]"),
    ("ssd_step", {"dt_bias": rate[1:]}, ValueError, r"dt_bias must be float\[6\], got float32\[5\]"),
    ("gated_delta_tree_scan", {"k": keys[:, :, :1]}, ValueError, r"k must be float\[2, 3, 2, 7\], got"),
    ("gated_delta_tree_scan", {"g": -x4}, ValueError, r"g must be float\[2, 3, 6, 7\], got float32\[2, 3, 6, 5\]"),
    ("gated_delta_tree_scan", {"u": x4[:, :1], "first": 2}, ValueError,
     r"needs that U >= first, got U = 1 of u \[b, U, hv, dv\] and first = 2"),
    ("selective_step", {"previous": (flat, dt3, draw(2, 3, 5))}, ValueError,
     r"previous\[2\] must be float\[2, 3, 7\], got float32\[2, 3, 5\]"),
    ("tree_conv1d", {"window": window[..., :2]}, ValueError, r"window must be float\[2, 6, 3\], got"),
    ("tree_conv1d", {"activation": "gelu"}, ValueError, "activation must be 'silu' or None, got 'gelu'"),
    ("conv_step", {"x": flat[:, :2]}, ValueError, r"x must be float\[2, 3, 6\], got float32\[2, 2, 6\]"),
    ("conv_step", {"stash": draw(2, 2, 6)}, ValueError,
     r"conv_step needs that n <= N, got n = 3 of parents \[b, n\] and N = 2 of stash \[b, N, c\]"),
    ("tree_attention", {"k_cache": draw(2, 4, 9, 5)}, ValueError,
     "needs that hk divides hq, got hk = 4 of k_cache .* and hq = 6 of q"),
    ("tree_attention", {"lengths": one.long()}, TypeError, r"lengths must be int32\[2\], got int64\[2\]"),
    ("tree_attention", {"first": 1}, ValueError, r"q must be float\[2, 2, 6, 5\], got float32\[2, 3, 6, 5\]"),
    ("gated_rms_norm", {"gate": draw(2, 3, 5)}, ValueError, r"gate must be float\[2, 3, 6\], got float32\[2, 3, 5\]"),
    ("gated_rms_norm", {"groups": 5}, ValueError, "needs that groups divides c, got groups = 5 and c = 6 of x"),
    ("gated_rms_norm", {"activation": "relu"}, ValueError, "activation must be 'silu' or 'sigmoid', got 'relu'"),
    ("gated_rms_norm", {"x": flat.double(), **T}, TypeError, "gated_rms_norm with backend='triton' takes float32, bf"),
    ("gated_rms_norm", {"gate": draw(2, 6, 3).mT, **T}, ValueError, "gate must be contiguous in its last dimension"),
    ("gated_rms_norm", {"x": wide, "gate": wide, "weight": wide[0], **T}, NotImplementedError,
     "takes groups of channels up to 16384, got 16385"),
    ("rms_norm", {"weight": weight[1:]}, ValueError, r"weight must be float\[6\], got float32\[5\]"),
    ("rms_norm_add", {"residual": flat[:, 1:]}, ValueError, r"residual must be float\[2, 3, 6\], got"),
    ("rms_norm_add", {"other": flat[:, 1:]}, ValueError, r"other must be float\[2, 3, 6\], got float32\[2, 2, 6\]"),
    ("rms_norm_add", {"x": weight}, ValueError, r"x must be \[\.\.\., n, c\], got"),
    ("rms_norm_add", {"x": wide, "residual": wide, "weight": wide[0], **T}, NotImplementedError,
     "rms_norm_add with backend='triton' takes rows of channels up to"),
    ("rotary", {"k": draw(1, 1, 2, 8)}, ValueError, r"k must be float\[1, 1, 3, 8\], got float32\[1, 1, 2, 8\]"),
    ("rotary", {"sin": angles[..., 2:]}, ValueError, r"sin must be float\[1, 3, 8\], got float32\[1, 3, 6\]"),
    ("rotary", {"cos": angles[..., 1:], "sin": angles[..., 1:]}, ValueError,
     r"rotary needs that r % 2 == 0, got r = 7 of cos \[t, n, r\]"),
    ("rotary", {"k": draw(1, 1, 3, 8).half(), **T}, TypeError, "rotary .* takes float32, bfloat16 or float16"),
    ("gated_activation", {"up": angles[0, :, 1:]}, ValueError, r"up must be float\[3, 8\], got float32\[3, 7\]"),
    ("gated_activation", {"activation": "gelu"}, ValueError,
     "activation must be 'silu', 'gelu_tanh' or 'relu_squared', got 'gelu'"),
    ("gated_activation", {"gate": angles[0].T, **T}, ValueError, "gate must be contiguous in its last dimension, got"),
    ("delta_inputs", {"key_heads": 3}, ValueError,
     r"needs that 2 \* key_heads divides c, got key_heads = 3 and c = 8 of qk"),
    ("delta_inputs", {"a": angles}, ValueError, "a, A_log and dt_bias go together"),
    ("delta_inputs", {"a": angles, "A_log": angles[0, 0, 1:], "dt_bias": angles[0, 0]}, ValueError,
     r"A_log must be float\[8\], got float32\[7\]"),
    ("experts", {"gated": False}, ValueError, r"up must be float\[3, 4, 16\], got float32\[3, 8, 16\]"),
    ("experts", {"index": index.int()}, TypeError, r"index must be int64\[3, 1\], got int32\[3, 1\]"),
    ("experts", {"activation": "gelu"}, ValueError, "activation must be 'silu', 'gelu_tanh' or 'relu_squared', got"),
    ("experts", {"up": draw(3, 16, 8).mT, **T}, ValueError, "up must be contiguous in its last 3 dimensions"),
]  # fmt: skip


def call(op: str, **changes: Any) -> Any:
    given = VALID[op] | changes
    if "backend" in changes:
        given = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in given.items()}
    return getattr(ops, op)(**given)


@pytest.mark.parametrize("op", VALID)
def test_valid_arguments_are_taken(op: str) -> None:
    call(op)


@pytest.mark.parametrize(
    ("op", "changes", "error", "message"), MISTAKES, ids=[f"{op}-{'-'.join(changes)}" for op, changes, *_ in MISTAKES]
)
def test_a_mistake_is_named(op: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(op, **changes)


def test_a_mistake_in_the_last_argument_is_named_before_anything_is_written() -> None:
    tensors = {"window": window.clone(), "stash": draw(2, 4, 6)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for changes in ({"path": path3}, {"path": path3, "path_lengths": one[:1]}, {"bias": draw(5)}):
        with pytest.raises(ValueError, match="must be"):
            call("conv_step", **tensors, **changes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_a_declared_operation_keeps_its_signature_and_lists_its_shapes() -> None:
    assert list(inspect.signature(ops.conv_commit).parameters) == ["window", "x", "path", "path_lengths", "backend"]
    assert "Shapes: window [b c t], x [b n c]." in str(ops.conv_commit.__doc__)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'path_lengths'"):
        ops.conv_commit(window, flat, path3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'last'"):
        scan_once(chain, last=1)


def test_debug_reads_the_values_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Topology.of(chain.flip(1).contiguous())
    call("ssd_tree_scan", parents=late)
    monkeypatch.setattr(checks, "DEBUG", True)
    with pytest.raises(ValueError, match=r"parents\[:, 0\] must be -1"):
        call("ssd_tree_scan", parents=late)
    with pytest.raises(ValueError, match=r"path_lengths must be in \[0, 3\], got \[4, 4\]"):
        call("ssd_commit", path_lengths=lengths1 + 1)
    with pytest.raises(ValueError, match=r"path must hold nodes up to path_lengths \[3, 3\]"):
        call("ssd_commit", path=path3 - 1)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_empty_batch_is_refused_by_every_backend(backend: ops.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    none = torch.zeros(0, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="the batch must be at least 1, got 0"):
        ops.diagonal_tree_scan(torch.zeros(0, 3, 4), torch.zeros(0, 3, 4), none, torch.zeros(0, 4), backend=backend)
    with pytest.raises(ValueError, match="the batch must be at least 1, got 0"):
        ops.conv_commit(torch.zeros(0, 4, 2), torch.zeros(0, 3, 4), none, none[:, 0], backend=backend)
