"""Which builds kernels ask Triton for: as few as sizes need, so that no tree of a generation is compiled for itself.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_builds.py
"""

# Options travel as dictionaries, which a type checker cannot count against a signature.
# mypy: disable-error-code="arg-type, call-arg, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.launch_keys import Key, launch_keys
from helpers.operation_families import ATTENTION
from helpers.operation_problem import DEVICE, Problem, chain, random_parents
from torch import Tensor

from stree.kernels import ops
from stree.kernels.attention.kernel import attention_kernel
from stree.kernels.dispatch import as_on_device
from stree.kernels.sampling import softmax_kernel
from stree.kernels.sampling.kernel import draw_kernel, walk_kernel
from stree.kernels.step import bookkeeping, texts
from stree.kernels.topology import AcceptedPath, Topology
from stree.kernels.tree_growth import api, learning_kernel
from stree.kernels.tree_growth.operands import Memory
from stree.kernels.tree_indices import ancestor_mask

Run = Callable[[], object]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


# Operands of some sizes, and the call whose launches count.


def attention(n: int, first: int, context: int, entries: int) -> Run:
    options, sizes = {"scale": 0.4, "window": None, "softcap": None}, {"shared": 1, "dim": 16, "value_dim": 16}
    problem = Problem.draw(
        ATTENTION, random_parents(n, 1), dtype=torch.float32, options=options, capacity=context,
        lengths=(context - 5,), **sizes,
    )  # fmt: skip
    stash, topology = problem.stash(45), Topology.of(problem.parents)
    path, lengths = zeros(1, entries, dtype=torch.int32), torch.ones(1, dtype=torch.int32, device=DEVICE)
    return lambda: problem.step(stash, path, lengths, first, "triton", topology=topology)


def norms(width: int, batch: int, n: int) -> Run:
    projected, weight = draw(batch, n, 112), draw(width)
    x, gate = projected[..., :width], projected[..., 64 : 64 + width]

    def run() -> None:
        ops.gated_rms_norm(x, gate, weight, eps=1e-5, backend="triton")
        ops.rms_norm_add(x, gate, weight, eps=1e-5, backend="triton")
        ops.rms_norm_add(x, gate, weight, eps=1e-5, other=gate, backend="triton")
        ops.rms_norm(x, weight, eps=1e-5, backend="triton")

    return run


def pointwise(batch: int, n: int) -> Run:
    q, k = draw(batch, n, 4, 32).transpose(1, 2), draw(batch, n, 2, 32).transpose(1, 2)
    cos, rows, small, up, down = draw(batch, n, 32), draw(batch, n, 96), draw(batch, n, 32), *draw(2, 2, 64, 96)
    tokens, index = rows.flatten(0, 1), zeros(batch * n, 2) + torch.arange(2, device=DEVICE)

    def run() -> None:
        ops.rotary(q, k, cos, cos, backend="triton")
        ops.gated_activation(rows[..., :48], rows[..., 48:], backend="triton")
        rates = rows[0, 0, :16], rows[0, 0, :16]
        ops.delta_inputs(rows[..., :64], small[..., :16], small[..., 16:], *rates, key_heads=2, backend="triton")
        ops.experts(tokens, index, tokens[:, :2], up, down.view(2, 96, 64)[..., :32].contiguous(), backend="triton")

    return run


def convolution(width: int, n: int) -> Run:
    """Rows that are a part of a projection of ``width`` channels."""
    x, weight, window = draw(2, n, width)[..., :16], draw(16, 4), draw(2, 16, 3)
    topology = Topology.of(chain(n, 2).to(DEVICE), 4)
    return lambda: ops.tree_conv1d(x, weight, None, topology, window, backend="triton")


def mixer(batch: int, n: int, first: int) -> Run:
    """A Mamba-2 mixer of 2 heads, whose projection has 8 columns more than a multiple of 16."""
    gate, xbc, dt = draw(batch, n - first, 32 + 64 + 8).split([32, 64, 8], -1)
    state, window, weight, step_sizes = draw(batch, 2, 16, 16), draw(batch, 64, 3), draw(64, 4), draw(batch, 16, 2)
    stashes, trees = draw(2, batch, 16, 64), Topology.of(chain(n, batch).to(DEVICE), 4)
    return lambda: ops.mamba2_step(
        window, stashes[0], weight, None, state, stashes[1], step_sizes, None, None, xbc, dt[..., :2],
        -weight[:2, 0].abs(), None, trees, headdim=16, ngroups=1, first=first, gating=(gate, weight.flatten()[:32]),
        backend="triton",
    )  # fmt: skip


def topology(batch: int, n: int, m: int) -> Run:
    parents = random_parents(n, batch).to(DEVICE)
    mask, path, lengths = ancestor_mask(parents), zeros(batch, m, dtype=torch.int32), parents.new_zeros(batch)
    return lambda: (
        Topology.of(parents, 4, mask=mask, backend="triton"), AcceptedPath.of(path, lengths, 4, backend="triton")
    )  # fmt: skip


def distinct(rows: int, count: int, vocab: int = 101) -> Run:
    dist, numbers = torch.full((2, rows, vocab), 1 / vocab, device=DEVICE), zeros(2, rows, count, dtype=torch.float64)
    return lambda: ops.draw_distinct(dist, numbers, backend="triton")


def walk(vocab: int, temperature: float, n: int, batch: int = 1) -> Run:
    tokens, parents, scores = zeros(batch, n), chain(n, batch).to(DEVICE), draw(batch, n, vocab)
    numbers = {"seed": 3, "sequences": zeros(batch), "positions": zeros(batch)} if temperature else {}
    scores = scores.softmax(-1) if temperature else scores
    return lambda: ops.match_accept(tokens, parents, scores, max_depth=n - 1, **numbers, backend="triton")


def softmax(vocab: int, batch: int, rows: int, used: int, step: int) -> Run:
    room = torch.zeros(batch, used + step * rows + 2, vocab, device=DEVICE)
    logits = torch.zeros(batch, step * rows, vocab, device=DEVICE)[:, ::step]
    out = room[:, used : used + step * rows : step]
    return lambda: softmax_kernel.probs_and_norms(logits, 0.8, out)


def deferred_rows(layers: int, batch: int, n: int) -> Run:
    sources, rows = ([torch.zeros(layers, batch, size, width, device=DEVICE) for width in (48, 3)] for size in (n, 16))
    begins = torch.arange(0, n * layers * batch, n, device=DEVICE).view(layers, batch, 1)
    nodes, path, lengths = zeros(batch, 16), zeros(batch, n % 13, dtype=torch.int32), zeros(batch, dtype=torch.int32)

    @as_on_device(host_can_read=True)
    def run() -> None:
        bookkeeping.copy_rows(nodes, begins, sources, rows)
        deferred = bookkeeping.DeferredPath(nodes, lengths.clone())
        bookkeeping.defer_path(path, lengths, deferred, lengths.clone())

    return run


def step_ends(m: int, n: int) -> Run:
    """The last kernels of a step."""
    tokens, path, lengths, zero = zeros(2, n), zeros(2, m, dtype=torch.int32) - 1, zeros(2, dtype=torch.int32), zeros(2)
    stop, text = torch.arange(m % 3, device=DEVICE).expand(2, -1), zeros(2, 8 + m)
    known = texts.Texts(text, zero.clone(), zero.clone(), zero + 9, zero.bool(), stop)
    highest = zeros(2, n, dtype=torch.float32)

    @as_on_device(host_can_read=True)
    def run() -> None:
        texts._emit_in_one(tokens, path, lengths, zero, known, highest, may_be_infinite=True)
        bookkeeping.path_on_columns(path, lengths, None, n)
        bookkeeping.path_on_nodes(path, lengths, n // 4)

    return run


def selection(by_value: bool, batch: int, room: int, size: int, count: int) -> Run:
    ones = zeros(batch) + 1
    columns = api.begin(texts.Seen(ones[:, None], ones, ones), room)
    return as_on_device()(lambda: api.select(columns, size, count, by_value=by_value))


def memory(batch: int, n: int, m: int) -> Run:
    path = zeros(batch, m, dtype=torch.int32)
    return lambda: learning_kernel.remember(
        Memory.empty(batch, torch.device(DEVICE)), zeros(batch, n), path, path[:, 0]
    )


class Case(NamedTuple):
    """Sizes whose launches have the same builds.

    Attributes:
        prepare: operands and call.
        same: sizes.
        kernels: names, in the order of their launches.
        other: sizes that need other builds, or None.
        words: that the first launch's build is named with.
    """

    prepare: Callable[..., Run]
    same: list[tuple[Any, ...]]
    kernels: list[str]
    other: tuple[Any, ...] | None = None
    words: str = ""


POINTWISE = ["rotary", "gated_activation", "delta_inputs", "experts_up", "experts_down", "experts_sum"]
SOFTMAX = [(1, 1, 0, 1), (1, 16, 14, 1), (3, 7, 8, 1), (16, 1, 23, 1), (2, 3, 5, 16)]
WALKED = [(7, 1), (1, 1), (16, 1), (2, 8), (16, 16)]
SLOW: dict[str, Case] = {
    "attention to a short context": Case(
        attention, [(7, 0, 40, 3), (1, 0, 16, 1), (16, 0, 64, 16), (2, 0, 33, 2)], ["kv_commit", "attention"]
    ),
    "attention to a long context": Case(
        attention, [(7, 2, 150, 3), (2, 1, 128, 1), (16, 15, 160, 16), (16, 1, 450, 5)],
        ["kv_commit", "attention", "merge"],
    ),
    "mixer": Case(mixer, [(1, 5, 0), (2, 16, 0), (1, 1, 0)], ["ssd"], (1, 7, 2)),
    "pointwise": Case(pointwise, [(1, 5), (1, 16), (3, 7), (1, 1)], POINTWISE),
    "distinct draws": Case(distinct, [(1, 4), (16, 3), (17, 4)], ["blocks", "distinct"], (1, 4, 5000)),
    **{
        f"walk of {vocab} tokens at {temperature}": Case(
            walk, [(vocab, temperature, *sizes) for sizes in WALKED], ["blocks", "draw", "walk"],
            (vocab, temperature, 17),
        )
        for vocab, temperature in ((101, 0.0), (128, 1.0))
    },
}  # fmt: skip
CASES: dict[str, Case] = SLOW | {
    "norms": Case(
        norms, [(39, *sizes) for sizes in ((1, 5), (1, 1), (1, 16), (16, 1), (3, 7))], ["gated_norm", *["norm_add"] * 3]
    ),
    **{f"convolution of {width}": Case(convolution, [(width, n) for n in (13, 14, 15, 16)], ["conv"])
       for width in (24, 32)},
    "topology": Case(
        topology, [(1, 5, 3), (2, 5, 3), (1, 16, 16), (16, 1, 1), (3, 64, 5), (1, 128, 16)], ["tree", "path"]
    ),
    **{
        f"softmax of {vocab}": Case(
            softmax, [(vocab, *sizes) for sizes in SOFTMAX], ["masses", "probs"], words=f"'ALIGNED': {vocab == 128}"
        )
        for vocab in (101, 128)
    },
    "deferred rows": Case(deferred_rows, [(2, 1, 16), (3, 4, 33), (1, 2, 7)], ["rows", "defer"]),
    "ends of steps": Case(step_ends, [(4, 16), (7, 31), (5, 33)], ["emit", "columns", "nodes"]),
    **{
        f"selection by {'value' if by_value else 'order'}": Case(
            selection, [(by_value, 1, 40, 20, 10), (by_value, 3, 33, 33, 16)], ["select"], (by_value, 2, 64, 19, 17)
        )
        for by_value in (False, True)
    },
    "memory of a text": Case(memory, [(1, 18, 3), (3, 32, 16)], ["remember"], (2, 33, 17)),
}  # fmt: skip


def launches(monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., Run], sizes: tuple[Any, ...]) -> list[Key]:
    run = prepare(*sizes)
    with launch_keys(monkeypatch) as keys:
        run()
    return keys


@pytest.mark.parametrize(
    "name",
    slow_unless(lambda name: name not in SLOW, CASES, in_ci=lambda name: name in ("mixer", "pointwise")),
)
def test_sizes_that_differ_from_step_to_step_share_their_builds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, same, kernels, other, words = CASES[name]
    first, *others = (launches(monkeypatch, prepare, sizes) for sizes in same)
    assert [kernel for kernel, _ in first] == [f"{kernel}_kernel" for kernel in kernels] and words in first[0][1]
    assert others == [first] * len(others)
    assert other is None or launches(monkeypatch, prepare, other) != first, "another padded size shows in the key"


@pytest.mark.parametrize(
    ("kernels", "prepare", "sizes"),
    [
        pytest.param((attention_kernel,), attention, [(7, 0, 40, 3), (16, 0, 64, 16)], marks=pytest.mark.slow),
        ((draw_kernel, walk_kernel), walk, [(101, 0.0, n) for n in (1, 7, 16)]),
    ],
    ids=["attention", "walk"],
)
def test_a_kernel_that_specialises_its_integers_has_another_key_for_each(
    kernels: tuple[Any, ...], prepare: Callable[..., Run], sizes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in kernels:
        options = getattr(kernel, "kwargs" if hasattr(kernel, "kwargs") else "__dict__")
        monkeypatch.setitem(options, "do_not_specialize", [])
    assert len({tuple(launches(monkeypatch, prepare, one)) for one in sizes}) == len(sizes)
