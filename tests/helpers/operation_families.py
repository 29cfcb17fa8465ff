"""Each operation family for tests: how operands are drawn, and how its scan, commit, step and oracle are called."""

# Operands travel as dictionaries, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import oracles
from helpers.operation_problem import Family, Tensors
from stree.kernels import ops

LIMIT = (0.05, 1.5)  # of Mamba-2's step sizes
OPTIONS: dict[str, float | None] = {"scale": 0.4, "window": 30, "softcap": 3.0}  # of attention, unless others are given


# Mamba-2.


def _draw_ssd(
    normal: Any, batch: int, n: int, heads: int = 4, headdim: int = 5, groups: int = 2, dstate: int = 7
) -> Tensors:
    width = heads * headdim + 2 * groups * dstate
    return {
        "state": normal(batch, heads, headdim, dstate), "xbc": normal(batch, n, width), "dt": normal(batch, n, heads),
        "A": -normal(heads).abs() * 2, "bias": normal(heads) - 1, "D": normal(heads),
    }  # fmt: skip


def _split(given: Tensors, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, heads, headdim, dstate = given["state"].shape if given["state"].ndim == 4 else (1, *given["state"].shape)
    span = (xbc.shape[-1] - heads * headdim) // 2
    x, B, C = xbc.split((heads * headdim, span, span), -1)
    return x.unflatten(-1, (heads, -1)), B.unflatten(-1, (-1, dstate)), C.unflatten(-1, (-1, dstate))


def _scan_ssd(i: Tensors, kept: Tensors, parents: Any, first: int, **options: Any) -> Tensor:
    x, B, C = _split(i, kept["stash_xbc"])
    return ops.ssd_tree_scan(x, kept["stash_dt"], i["A"], B, C, parents, i["state"], D=i["D"], first=first, **options)


def _commit_ssd(i: Tensors, kept: Tensors, path: Any, lengths: Any, **options: Any) -> None:
    x, B, _ = _split(i, kept["stash_xbc"])
    ops.ssd_commit(i["state"], x, kept["stash_dt"], i["A"], B, path, lengths, **options)


def _step_ssd(i: Tensors, stash: Tensors, path: Any, lengths: Any, parents: Any, first: int, **options: Any) -> Tensor:
    _, B, _ = _split(i, i["xbc"])
    return ops.ssd_step(
        i["state"], *stash.values(), path, lengths, i["xbc"], i["dt"], i["A"], i["bias"], parents,
        headdim=i["state"].shape[2], ngroups=B.shape[2], D=i["D"], dt_limit=LIMIT, first=first, **options,
    )  # fmt: skip


def _oracle_ssd(i: Tensors, kept: Tensors, parents: list[int]) -> tuple[Tensor, list[list[Tensor]]]:
    x, B, C = _split(i, kept["stash_xbc"])
    y, states = oracles.ssd(x, kept["stash_dt"], i["A"], B, C, parents, i["state"], i["D"])
    return y, [states]


def _sizes(i: Tensors) -> Tensor:
    """Step sizes after bias and softplus."""
    return F.softplus(i["dt"].to(i["bias"].dtype) + i["bias"])


SSD = Family(
    "ssd", ("state",), ("xbc", "dt"), frozenset({"xbc", "dt", "stash_xbc"}), _draw_ssd,
    lambda i: {"stash_xbc": i["xbc"], "stash_dt": _sizes(i).clamp(*LIMIT)},
    _scan_ssd, _commit_ssd, _step_ssd, _oracle_ssd,
)  # fmt: skip


# Gated DeltaNet, KDA.


def _draw_delta(
    normal: Any, batch: int, n: int, key_heads: int = 2, heads: int = 4, dk: int = 7, dv: int = 5,
    channels: bool = False,
) -> Tensors:  # fmt: skip
    q, k = (F.normalize(normal(batch, n, key_heads, dk), dim=-1) for _ in range(2))
    g = -normal(batch, n, heads, *[dk] * channels).abs()
    beta = 2 * normal(batch, n, heads).sigmoid()
    return {
        "state": normal(batch, heads, dk, dv),
        "q": q,
        "k": k,
        "v": normal(batch, n, heads, dv),
        "g": g,
        "beta": beta,
    }


DELTA_ROWS = ("q", "k", "v", "g", "beta")
SCALE = 0.7  # not the default


def _stashed_delta(i: Tensors) -> Tensors:
    wide = (i[name].double() for name in DELTA_ROWS)
    _, u = ops.gated_delta_tree_scan(*wide, i["parents"], i["state"].double(), backend="reference")
    return {"stash_k": i["k"], "stash_u": u.contiguous(), "stash_g": i["g"]}


def _scan_delta(i: Tensors, kept: Tensors, parents: Any, first: int, **options: Any) -> Tensor:
    rows = (i[name] for name in DELTA_ROWS)
    return ops.gated_delta_tree_scan(*rows, parents, i["state"], scale=SCALE, first=first, **options)[0]


def _oracle_delta(i: Tensors, kept: Tensors, parents: list[int]) -> tuple[Tensor, list[list[Tensor]]]:
    out, states = oracles.gated_delta(*(i[name] for name in DELTA_ROWS), parents, i["state"], SCALE)
    return out, [states]


DELTA = Family(
    "gated_delta", ("state",), DELTA_ROWS, frozenset({"q", "k", "v", "stash_k"}),
    _draw_delta, _stashed_delta, _scan_delta,
    lambda i, kept, path, lengths, **options: ops.gated_delta_commit(
        i["state"], *kept.values(), path, lengths, **options
    ),
    lambda i, stash, path, lengths, parents, first, **options: ops.gated_delta_step(
        i["state"], *stash.values(), path, lengths, *(i[name] for name in DELTA_ROWS), parents, scale=SCALE,
        first=first, **options,
    ),
    _oracle_delta,
)  # fmt: skip
KDA = replace(DELTA, name="kda", draw=lambda *args, **sizes: _draw_delta(*args, **{"channels": True, **sizes}))


# Mamba-1, RG-LRU.


def _draw_selective(normal: Any, batch: int, n: int, channels: int = 5, dstate: int = 3) -> Tensors:
    return {
        "state": normal(batch, channels, dstate), "x": normal(batch, n, channels), "dt": normal(batch, n, channels),
        "B": normal(batch, n, dstate), "C": normal(batch, n, dstate), "A": -normal(channels, dstate).abs() * 2,
        "bias": normal(channels) - 1, "D": normal(channels),
    }  # fmt: skip


def _scan_selective(i: Tensors, kept: Tensors, parents: Any, first: int, **options: Any) -> Tensor:
    x, dt, B = kept.values()
    return ops.selective_tree_scan(x, dt, i["A"], B, i["C"], parents, i["state"], D=i["D"], first=first, **options)


def _commit_selective(i: Tensors, kept: Tensors, path: Any, lengths: Any, **options: Any) -> None:
    x, dt, B = kept.values()
    ops.selective_commit(i["state"], x, dt, i["A"], B, path, lengths, **options)


def _oracle_selective(i: Tensors, kept: Tensors, parents: list[int]) -> tuple[Tensor, list[list[Tensor]]]:
    x, dt, B = kept.values()
    y, states = oracles.selective(x, dt, i["A"], B, i["C"], parents, i["state"], i["D"])
    return y, [states]


SELECTIVE = Family(
    "selective", ("state",), ("x", "dt", "B", "C"), frozenset({"x", "dt", "B", "C", "stash_x", "stash_B"}),
    _draw_selective,
    lambda i: {"stash_x": i["x"], "stash_dt": _sizes(i), "stash_B": i["B"]}, _scan_selective, _commit_selective,
    lambda i, stash, path, lengths, parents, first, **options: ops.selective_step(
        i["state"], *stash.values(), path, lengths, i["x"], i["dt"], i["A"], i["B"], i["C"], i["bias"], parents,
        D=i["D"], first=first, **options,
    ),
    _oracle_selective,
)  # fmt: skip


def _oracle_diagonal(i: Tensors, kept: Tensors, parents: list[int]) -> tuple[Tensor, list[list[Tensor]]]:
    states = oracles.diagonal(*kept.values(), parents, i["state"])
    return torch.stack(states), [states]


DIAGONAL = Family(
    "diagonal", ("state",), ("log_a", "x"), frozenset({"x", "stash_x"}),
    lambda normal, batch, n, channels=5: {
        "state": normal(batch, channels), "log_a": -normal(batch, n, channels).abs(), "x": normal(batch, n, channels)
    },
    lambda i: {"stash_log_a": i["log_a"], "stash_x": i["x"]},
    lambda i, kept, parents, first, **options: ops.diagonal_tree_scan(
        *kept.values(), parents, i["state"], first=first, **options
    ),
    lambda i, kept, path, lengths, **options: ops.diagonal_commit(i["state"], *kept.values(), path, lengths, **options),
    lambda i, stash, path, lengths, parents, first, **options: ops.diagonal_step(
        i["state"], *stash.values(), path, lengths, i["log_a"], i["x"], parents, first=first, **options
    ),
    _oracle_diagonal, alternates=False,
)  # fmt: skip


# The short convolution, attention.


def _oracle_conv(i: Tensors, kept: Tensors, parents: list[int]) -> tuple[Tensor, list[list[Tensor]]]:
    y, windows = oracles.conv(kept["stash_x"], i["weight"], i["bias"], parents, i["window"], True)
    return y, [windows]


CONV = Family(
    "conv", ("window",), ("x",), frozenset({"window", "x", "weight", "bias", "stash_x"}),
    lambda normal, batch, n, channels=5, width=4: {
        "window": normal(batch, channels, width - 1), "x": normal(batch, n, channels),
        "weight": normal(channels, width), "bias": normal(channels),
    },
    lambda i: {"stash_x": i["x"]},
    lambda i, kept, parents, first, **options: ops.tree_conv1d(
        kept["stash_x"], i["weight"], i["bias"], parents, i["window"], first=first, **options
    ),
    lambda i, kept, path, lengths, **options: ops.conv_commit(i["window"], kept["stash_x"], path, lengths, **options),
    lambda i, stash, path, lengths, parents, first, **options: ops.conv_step(
        i["window"], stash["stash_x"], path, lengths, i["x"], i["weight"], i["bias"], parents, first=first, **options
    ),
    _oracle_conv, alternates=False,
)  # fmt: skip


def _draw_attention(
    normal: Any, batch: int, n: int, kv_heads: int = 2, shared: int = 3, dim: int = 5, value_dim: int = 3,
    capacity: int = 40, lengths: tuple[int, ...] = (0, 7, 14),
) -> Tensors:  # fmt: skip
    return {
        "k_cache": normal(batch, kv_heads, capacity, dim), "v_cache": normal(batch, kv_heads, capacity, value_dim),
        "lengths": torch.tensor(lengths[:batch], dtype=torch.int32), "q": normal(batch, n, kv_heads * shared, dim),
        "k": normal(batch, n, kv_heads, dim), "v": normal(batch, n, kv_heads, value_dim),
    }  # fmt: skip


def _scan_attention(i: Tensors, kept: Tensors, parents: Any, first: int, **options: Any) -> Tensor:
    cache = i["k_cache"], i["v_cache"], i["lengths"]
    return ops.tree_attention(i["q"][:, first:], *cache, *kept.values(), parents, first=first, **(OPTIONS | options))


def _commit_attention(i: Tensors, kept: Tensors, path: Any, lengths: Any, **options: Any) -> None:
    ops.kv_commit(i["k_cache"], i["v_cache"], i["lengths"], *kept.values(), path, lengths, **options)
    i["lengths"] += (path.lengths if lengths is None else lengths).int()


def _step_attention(
    i: Tensors, stash: Tensors, path: Any, lengths: Any, parents: Any, first: int, **options: Any
) -> Tensor:
    if path is not None:
        i["lengths"] += (path.lengths if lengths is None else lengths).int()
    cache = i["k_cache"], i["v_cache"], i["lengths"]
    new = i["q"], i["k"], i["v"]
    return ops.attention_step(
        *cache, *stash.values(), path, lengths, *new, parents, first=first, **(OPTIONS | options)
    )  # fmt: skip


def _oracle_attention(
    i: Tensors, kept: Tensors, parents: list[int], **options: Any
) -> tuple[Tensor, list[list[Tensor]]]:
    length, (k, v) = int(i["lengths"]), kept.values()
    context = i["k_cache"][:, :length], i["v_cache"][:, :length]
    y = oracles.attention(i["q"], *context, k, v, parents, **(OPTIONS | options))
    states: list[list[Tensor]] = [[], [], []]
    for node in range(len(parents)):
        path = oracles.path_to(parents, node)
        for found, cache, rows in zip(states[:2], (i["k_cache"], i["v_cache"]), (k, v), strict=True):
            fits = path[: cache.shape[1] - length]  # a path that does not fit is cut at the end of the cache
            found.append(cache.double().clone())
            found[-1][:, length : length + len(fits)] = rows[fits].double().transpose(0, 1)
        states[2].append(torch.tensor(length + len(path), dtype=torch.float64))
    return y, states


ATTENTION = Family(
    "attention", ("k_cache", "v_cache", "lengths"), ("q", "k", "v"),
    frozenset({"k_cache", "v_cache", "q", "k", "v", "stash_k", "stash_v"}), _draw_attention,
    lambda i: {"stash_k": i["k"], "stash_v": i["v"]}, _scan_attention, _commit_attention, _step_attention,
    _oracle_attention, alternates=False,
)  # fmt: skip

FAMILIES = (SSD, DELTA, KDA, SELECTIVE, DIAGONAL, CONV, ATTENTION)
RECURRENCES = FAMILIES[:5]
# Few heads, each of which is a program that the interpreter runs.
FEW: dict[str, dict[str, Any]] = {
    "ssd": {"heads": 2, "groups": 1}, "gated_delta": {"key_heads": 1, "heads": 2}, "kda": {"key_heads": 1, "heads": 2},
    "attention": {"kv_heads": 1},
}  # fmt: skip
