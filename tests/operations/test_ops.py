"""stree.kernels.ops: checks, choice of implementation, fused steps, and that no operation synchronises with a device.

Run: python -m pytest tests/operations/test_ops.py
"""

# Inputs travel as tuples and dicts of any length, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc, no-untyped-call"

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.host_reads import NoHostReads
from torch import Tensor

from stree.kernels import checks, dispatch, ops
from stree.kernels.topology import AcceptedPath, Topology

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BATCH, N, ROOM = 2, 11, 16
HEADS, HEADDIM, GROUPS, DSTATE, WIDTH = 6, 5, 2, 7, 4
CHANNELS = HEADS * HEADDIM + 2 * GROUPS * DSTATE


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_trees(seed: int = 0, padding: int = 1) -> Tensor:
    return oracles.random_parents(BATCH, N, torch.Generator().manual_seed(seed), padding)


def stash(*shape: int) -> Tensor:
    return draw(BATCH, ROOM, *shape, seed=9)


def rows(first: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t[:, first:] for t in tensors)


# A step is commit, then write, then scan: bit for bit.  Each case returns (step, parts), two functions of
# (path, path_lengths, parents, first) that write the tensors they are given and return the outputs.

Part = Callable[[Any, Any, Any, int], Tensor]


def case_ssd(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Part, Part]:
    state, xbc, dt = draw(BATCH, HEADS, HEADDIM, DSTATE), draw(BATCH, N, CHANNELS).to(dtype), draw(BATCH, N, HEADS)
    A, bias, D = -draw(HEADS).abs(), draw(HEADS, seed=1), draw(HEADS, seed=2)
    ours = [state, stash(CHANNELS).to(dtype), stash(HEADS).abs()]
    theirs = [t.clone() for t in ours]

    def step(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        return ops.ssd_step(
            *ours, path, lengths, *rows(first, xbc, dt.to(dtype)), A, bias, parents, headdim=HEADDIM, ngroups=GROUPS,
            D=D, dt_limit=(0.1, 1.0), first=first,
        )  # fmt: skip

    def split(rows: Tensor) -> tuple[Tensor, ...]:
        x, B, C = rows.split([HEADS * HEADDIM, GROUPS * DSTATE, GROUPS * DSTATE], 2)
        return x.unflatten(2, (HEADS, -1)), B.unflatten(2, (GROUPS, -1)), C.unflatten(2, (GROUPS, -1))

    def parts(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        state, stash_xbc, stash_dt = theirs
        if path is not None:
            x, B, _ = split(stash_xbc)
            ops.ssd_commit(state, x, stash_dt, A, B, path, lengths)
        stash_xbc[:, first:N] = xbc[:, first:]
        stash_dt[:, first:N] = torch.nn.functional.softplus(dt.to(dtype)[:, first:].float() + bias).clamp(0.1, 1.0)
        x, B, C = split(stash_xbc[:, :N])
        return ops.ssd_tree_scan(x, stash_dt[:, :N], A, B, C, parents, state, D=D, first=first)

    return ours, theirs, step, parts


def case_gated_delta(dtype: torch.dtype, *channels: int) -> tuple[list[Tensor], list[Tensor], Part, Part]:
    q, k = (torch.nn.functional.normalize(draw(BATCH, N, 2, 5, seed=s), dim=-1).to(dtype) for s in range(2))
    v, g, beta = draw(BATCH, N, HEADS, 3).to(dtype), -draw(BATCH, N, HEADS, *channels).abs(), draw(BATCH, N, HEADS)
    beta = beta.sigmoid()
    ours = [draw(BATCH, HEADS, 5, 3), stash(2, 5).to(dtype), stash(HEADS, 3), -stash(HEADS, *channels).abs()]
    theirs = [t.clone() for t in ours]

    def step(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        return ops.gated_delta_step(*ours, path, lengths, *rows(first, q, k, v, g, beta), parents, first=first)

    def parts(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        state, stash_k, stash_u, stash_g = theirs
        if path is not None:
            ops.gated_delta_commit(*theirs, path, lengths)
        stash_k[:, first:N] = k[:, first:]
        stash_g[:, first:N] = g[:, first:]
        known = (q, stash_k[:, :N], v, stash_g[:, :N], beta, parents, state)
        o, u = ops.gated_delta_tree_scan(*known, first=first, u=stash_u)
        stash_u[:, first:N] = u[:, first:]
        return o

    return ours, theirs, step, parts


def case_kda(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Part, Part]:
    return case_gated_delta(dtype, 5)


def case_selective(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Part, Part]:
    x, dt, B, C = (draw(BATCH, N, size, seed=size).to(dtype) for size in (6, 6, 3, 3))
    A, bias, D = -draw(6, 3).abs(), draw(6), draw(6, seed=3)
    ours = [draw(BATCH, 6, 3), stash(6).to(dtype), stash(6).abs(), stash(3).to(dtype)]
    theirs = [t.clone() for t in ours]

    def step(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        (x_, dt_, B_, C_) = rows(first, x, dt, B, C)
        return ops.selective_step(*ours, path, lengths, x_, dt_, A, B_, C_, bias, parents, D=D, first=first)

    def parts(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        state, stash_x, stash_dt, stash_B = theirs
        if path is not None:
            ops.selective_commit(state, stash_x, stash_dt, A, stash_B, path, lengths)
        stash_x[:, first:N], stash_B[:, first:N] = x[:, first:], B[:, first:]
        stash_dt[:, first:N] = torch.nn.functional.softplus(dt[:, first:].float() + bias)
        x_, dt_, B_ = stash_x[:, :N], stash_dt[:, :N], stash_B[:, :N]
        return ops.selective_tree_scan(x_, dt_, A, B_, C, parents, state, D=D, first=first)

    return ours, theirs, step, parts


def case_diagonal(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Part, Part]:
    log_a, x = -draw(BATCH, N, 6).abs(), draw(BATCH, N, 6, seed=1).to(dtype)
    ours = [draw(BATCH, 6), -stash(6).abs(), stash(6).to(dtype)]
    theirs = [t.clone() for t in ours]

    def step(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        return ops.diagonal_step(*ours, path, lengths, *rows(first, log_a, x), parents, first=first)

    def parts(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        state, stash_log_a, stash_x = theirs
        if path is not None:
            ops.diagonal_commit(state, stash_log_a, stash_x, path, lengths)
        stash_log_a[:, first:N], stash_x[:, first:N] = log_a[:, first:], x[:, first:]
        return ops.diagonal_tree_scan(stash_log_a[:, :N], stash_x[:, :N], parents, state, first=first)

    return ours, theirs, step, parts


def case_conv(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Part, Part]:
    x, weight, bias = draw(BATCH, N, 6).to(dtype), draw(6, WIDTH).to(dtype), draw(6).to(dtype)
    ours = [draw(BATCH, 6, WIDTH - 1).to(dtype), stash(6).to(dtype)]
    theirs = [t.clone() for t in ours]

    def step(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        return ops.conv_step(*ours, path, lengths, x[:, first:], weight, bias, parents, first=first)

    def parts(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        window, rows = theirs
        if path is not None:
            ops.conv_commit(window, rows, path, lengths)
        rows[:, first:N] = x[:, first:]
        return ops.tree_conv1d(rows[:, :N], weight, bias, parents, window, first=first)

    return ours, theirs, step, parts


def case_attention(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Part, Part]:
    q, k, v = (draw(BATCH, N, heads, 5, seed=seed).to(dtype) for seed, heads in enumerate((6, 2, 2)))
    ours = [draw(BATCH, 2, 40, 5, seed=4).to(dtype), draw(BATCH, 2, 40, 5, seed=5).to(dtype), stash(2, 5).to(dtype)]
    ours.append(-ours[2])
    theirs = [t.clone() for t in ours]
    before = torch.tensor([6, 9], dtype=torch.int32)

    def after(path: Any, lengths: Any) -> Tensor:
        if path is None:
            return before
        grown: Tensor = before + (path.lengths if lengths is None else lengths).int()
        return grown

    def step(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        total, new = after(path, lengths), rows(first, q, k, v)
        caches, stashes = ours[:2], ours[2:]
        return ops.attention_step(
            *caches, total, *stashes, path, lengths, *new, parents, scale=0.4, window=8, softcap=3.0, first=first
        )

    def parts(path: Any, lengths: Any, parents: Any, first: int) -> Tensor:
        k_cache, v_cache, stash_k, stash_v = theirs
        if path is not None:
            ops.kv_commit(k_cache, v_cache, before, stash_k, stash_v, path, lengths)
        stash_k[:, first:N], stash_v[:, first:N] = k[:, first:], v[:, first:]
        return ops.tree_attention(
            q[:, first:], k_cache, v_cache, after(path, lengths), stash_k[:, :N], stash_v[:, :N], parents,
            scale=0.4, window=8, softcap=3.0, first=first,
        )  # fmt: skip

    return ours, theirs, step, parts


CASES = [case_ssd, case_gated_delta, case_kda, case_selective, case_diagonal, case_conv, case_attention]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("first", [0, 4], ids=["first0", "first4"])
@pytest.mark.parametrize("committed", ["no path", "tensors", "accepted path"])
def test_a_step_is_commit_then_write_then_scan(case: Any, dtype: torch.dtype, first: int, committed: str) -> None:
    ours, theirs, step, parts = case(dtype)
    path, lengths = oracles.paths_to(draw_trees(1), (7, None))
    prepared: tuple[Any, Any] = (path, lengths)
    if committed == "no path":
        prepared = (None, None)
    elif committed == "accepted path":
        prepared = (AcceptedPath.of(path, lengths, WIDTH), None)
    parents = draw_trees()
    y = step(*prepared, Topology.of(parents, WIDTH, jumps=True), first)
    assert torch.equal(y, parts(*prepared, parents, first))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert y.dtype == dtype and y.is_contiguous() and bool(y.isfinite().all())


@every_case
def test_steps_in_pieces_leave_the_same_stash_and_outputs(case: Any) -> None:
    whole, _, run_whole, _ = case(torch.float32)
    pieces, _, run_pieces, _ = case(torch.float32)
    parents = draw_trees(padding=0)
    expected = run_whole(None, None, parents, 0)
    run_pieces(None, None, parents, 0)  # rows below first are those of an earlier call
    assert torch.allclose(run_pieces(None, None, parents, 5), expected[:, 5:], rtol=0, atol=1e-5)
    for mine, other in zip(whole, pieces, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-5)


def test_the_watch_over_host_reads_sees_them() -> None:
    for read in (lambda t: t.item(), lambda t: t[t > 0], lambda t: t.nonzero(), lambda t: bool(t)):
        with NoHostReads(), pytest.raises(AssertionError, match="reads the device"):
            read(torch.ones(1))


@every_case
@pytest.mark.parametrize("first", [0, 4], ids=["first0", "first4"])
def test_no_step_reads_the_device(case: Any, first: int) -> None:
    _, _, step, _ = case(torch.float32)
    path, lengths = oracles.paths_to(draw_trees(1), (7, 2))
    parents = draw_trees()
    with NoHostReads():
        step(path, lengths, Topology.of(parents), first)
        accepted = AcceptedPath.of(path, lengths, WIDTH)
        step(accepted, None, Topology.of(parents, WIDTH, jumps=True), first)


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


def test_every_exported_operation_has_a_reference() -> None:
    for name in ops.__all__:
        if name.endswith(("_step", "_scan", "_commit", "_conv1d", "_attention")):
            assert callable(dispatch.choose(name, "reference", torch.zeros(1)))


# Bad input.

x4, state4 = draw(2, 3, 6, 5), draw(2, 6, 5, 7)
dt3, rate, keys = draw(2, 3, 6).abs(), -draw(6).abs(), draw(2, 3, 2, 7)
chain = torch.tensor([[-1, 0, 1]] * 2, dtype=torch.int32)
path3, lengths1 = chain + 1, torch.tensor([3, 3], dtype=torch.int32)
flat, one = draw(2, 3, 6), torch.ones(2, dtype=torch.int32)
query, cache = draw(2, 3, 6, 5), draw(2, 2, 9, 5)
window = draw(2, 6, 3)


def ssd(**changes: Any) -> Any:
    given = {"x": x4, "dt": dt3, "A": rate, "B": keys, "C": keys, "parents": chain, "state": state4} | changes
    return ops.ssd_tree_scan(**given)


def ssd_commit(**changes: Any) -> Any:
    given = {"state": state4.clone(), "x": x4, "dt": dt3, "A": rate, "B": keys, "path": path3}
    return ops.ssd_commit(**(given | {"path_lengths": lengths1} | changes))


def gated_delta(**changes: Any) -> Any:
    given = {"q": keys, "k": keys, "v": x4, "g": -dt3, "beta": dt3, "parents": chain, "state": draw(2, 6, 7, 5)}
    return ops.gated_delta_tree_scan(**(given | changes))


def conv(**changes: Any) -> Any:
    given: dict[str, Any] = {"x": flat, "weight": draw(6, 4), "bias": None, "parents": chain, "window": window}
    return ops.tree_conv1d(**(given | changes))


def conv_step(**changes: Any) -> Any:
    given: dict[str, Any] = {"window": window.clone(), "stash": draw(2, 4, 6), "path": None, "path_lengths": None}
    given |= {"x": flat, "weight": draw(6, 4), "bias": None, "parents": chain}
    return ops.conv_step(**(given | changes))


def attention(**changes: Any) -> Any:
    given = {"q": query, "k_cache": cache, "v_cache": cache, "lengths": one, "k": query[:, :, :2], "v": query[:, :, :2]}
    return ops.tree_attention(**(given | {"parents": chain, "scale": 1.0} | changes))


MISTAKES: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (ssd, {"x": x4[0]}, ValueError, r"x must be \[b, n, h, p\], got float32\[3, 6, 5\]"),
    (ssd, {"dt": dt3[:, :2]}, ValueError, r"dt must be float\[2, 3, 6\], got float32\[2, 2, 6\]"),
    (ssd, {"A": rate.long()}, TypeError, r"A must be float\[6\], got int64\[6\]"),
    (ssd, {"B": draw(2, 3, 4, 7)}, ValueError,
     r"ssd_tree_scan needs that g divides h, got g = 4 of B \[b, n, g, s\] and h = 6 of x \[b, n, h, p\]"),
    (ssd, {"C": keys[..., :5]}, ValueError, r"C must be float\[2, 3, 2, 7\], got float32\[2, 3, 2, 5\]"),
    (ssd, {"D": rate[:2]}, ValueError, r"D must be float\[6\], got float32\[2\]"),
    (ssd, {"D": torch.zeros(6, device="meta")}, ValueError, "D must be on cpu, got meta"),
    (ssd, {"state": state4.bfloat16()}, TypeError, r"state must be float32\[2, 6, 5, 7\], got bfloat16\[2, 6, 5, 7\]"),
    (ssd, {"x": x4.double()}, TypeError, r"state must be float64\[2, 6, 5, 7\], got float32\[2, 6, 5, 7\]"),
    (ssd, {"parents": chain.long()}, TypeError, r"parents must be int32\[2, 3\], got int64\[2, 3\]"),
    (ssd, {"parents": chain[0]}, ValueError, r"parents must be int32\[2, 3\], got int32\[3\]"),
    (ssd, {"parents": chain[:1]}, ValueError, r"parents must be int32\[2, 3\], got int32\[1, 3\]"),
    (ssd, {"parents": chain[:, :2]}, ValueError, r"parents must be int32\[2, 3\], for 3 rows of x, got int32\[2, 2\]"),
    (ssd, {"parents": Topology.of(chain[:, :2])}, ValueError, r"parents must be int32\[2, 3\], for 3 rows of x"),
    (ssd, {"parents": chain + 1}, ValueError, r"parents\[:, 0\] must be -1, got \[0, 0\]"),
    (ssd, {"parents": chain.clone().index_fill_(1, torch.tensor([1]), 2)}, ValueError,
     r"parents\[0, 1\] must be in \[-1, 1\), got 2"),
    (ssd, {"parents": torch.tensor([[-1, 0, 1], [-1, -1, 1]], dtype=torch.int32)}, ValueError,
     r"parents\[1, 2\] is 1, a padding node; padding has no children"),
    (ssd, {"first": 3}, ValueError, r"first must be in \[0, 3\) for 3 nodes, got 3"),
    (ssd_commit, {"path": path3.long()}, TypeError, r"path must be int32\[2, 3\], got int64\[2, 3\]"),
    (ssd_commit, {"path": path3[:1]}, ValueError, r"path must be int32\[2, 3\], got int32\[1, 3\]"),
    (ssd_commit, {"path_lengths": None}, ValueError, r"path_lengths must be int32\[2\], got None"),
    (ssd_commit, {"path_lengths": one[:1]}, ValueError, r"path_lengths must be int32\[2\], got int32\[1\]"),
    (ssd_commit, {"path": AcceptedPath.of(path3, lengths1)}, ValueError, "path_lengths must be None when path is an"),
    (ssd_commit, {"A": -draw(2, 5).abs()}, ValueError, r"A must be float\[2, 6\], got float32\[2, 5\]"),
    (gated_delta, {"k": keys[:, :, :1]}, ValueError, r"k must be float\[2, 3, 2, 7\], got float32\[2, 3, 1, 7\]"),
    (gated_delta, {"g": -x4}, ValueError, r"g must be float\[2, 3, 6, 7\], got float32\[2, 3, 6, 5\]"),
    (gated_delta, {"u": x4[:, :1], "first": 2}, ValueError,
     r"needs that U >= first, got U = 1 of u \[b, U, hv, dv\] and first = 2"),
    (conv, {"window": window[..., :2]}, ValueError, r"window must be float\[2, 6, 3\], got float32\[2, 6, 2\]"),
    (conv, {"activation": "gelu"}, ValueError, "activation must be 'silu' or None, got 'gelu'"),
    (conv_step, {"x": flat[:, :2]}, ValueError, r"x must be float\[2, 3, 6\], got float32\[2, 2, 6\]"),
    (conv_step, {"stash": draw(2, 2, 6)}, ValueError,
     r"conv_step needs that n <= N, got n = 3 of parents \[b, n\] and N = 2 of stash \[b, N, c\]"),
    (attention, {"k_cache": draw(2, 4, 9, 5)}, ValueError,
     "needs that hk divides hq, got hk = 4 of k_cache .* and hq = 6 of q"),
    (attention, {"lengths": one.long()}, TypeError, r"lengths must be int32\[2\], got int64\[2\]"),
    (attention, {"first": 1}, ValueError, r"q must be float\[2, 2, 6, 5\], got float32\[2, 3, 6, 5\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "changes", "error", "message"), MISTAKES, ids=[m[3][:40] for m in MISTAKES])
def test_a_mistake_is_named(call: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call()
    with pytest.raises(error, match=message):
        call(**changes)


def test_a_mistake_in_the_last_argument_is_named_before_anything_is_written() -> None:
    tensors = {"window": window.clone(), "stash": draw(2, 4, 6)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for changes in ({"path": path3}, {"path": path3, "path_lengths": one[:1]}, {"bias": draw(5)}):
        with pytest.raises(ValueError, match="must be"):
            conv_step(**tensors, **changes)
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
    ssd(parents=late)
    monkeypatch.setattr(checks, "DEBUG", True)
    with pytest.raises(ValueError, match=r"parents\[:, 0\] must be -1"):
        ssd(parents=late)
    with pytest.raises(ValueError, match=r"path_lengths must be in \[0, 3\], got \[4, 4\]"):
        ssd_commit(path_lengths=lengths1 + 1)
    with pytest.raises(ValueError, match=r"path must hold nodes up to path_lengths \[3, 3\]"):
        ssd_commit(path=path3 - 1)


@pytest.mark.parametrize("name", ["dt_bias", "D"])
def test_the_ssd_step_refuses_weights_that_do_not_fit_its_heads(name: str) -> None:
    heads, headdim, dstate, nodes = 2, 4, 3, 2
    width = heads * headdim + 2 * dstate
    weights = {"dt_bias": torch.zeros(heads), "D": torch.ones(heads)} | {name: torch.zeros(heads + 1)}
    with pytest.raises(ValueError, match=rf"{name} must be float\[2\], got float32\[3\]"):
        ops.ssd_step(
            torch.zeros(1, heads, headdim, dstate), torch.zeros(1, nodes, width), torch.zeros(1, nodes, heads),
            None, None, torch.zeros(1, nodes, width), torch.zeros(1, nodes, heads), -torch.ones(heads),
            weights["dt_bias"], torch.tensor([[-1, 0]], dtype=torch.int32), headdim=headdim, ngroups=1, D=weights["D"],
        )  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_empty_batch_is_refused_by_every_backend(backend: ops.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    none = torch.zeros(0, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="the batch must be at least 1, got 0"):
        ops.diagonal_tree_scan(torch.zeros(0, 3, 4), torch.zeros(0, 3, 4), none, torch.zeros(0, 4), backend=backend)
    with pytest.raises(ValueError, match="the batch must be at least 1, got 0"):
        ops.conv_commit(torch.zeros(0, 4, 2), torch.zeros(0, 3, 4), none, none[:, 0], backend=backend)
