"""SGLang's sequential kernels, one state snapshot a node, and their scatter commit, on the same inputs as ours.

They are loaded from the files in ``--peer-dir``, laid out as in SGLang's wheel.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import Delta, Mixer
from stree.kernels import ops

Inputs = dict[str, Any]
Provider = Callable[[Inputs], Tensor]
_peer_dir: Path | None = None


def use_peer_dir(folder: Path | None) -> None:
    """Name the folder that holds SGLang's kernel files.

    Raises:
        ValueError: the folder lacks them.
    """
    global _peer_dir
    if folder is not None and not (folder / "sglang" / "kernels" / "ops").is_dir():
        raise ValueError(f"--peer-dir must hold sglang/kernels/ops as SGLang's wheel does, got {folder}")
    _peer_dir = folder


def ssd_peers(mixer: Mixer) -> dict[str, Provider]:
    """Providers of a Mamba-2 step besides ours, by name."""
    return {} if _peer_dir is None else {"sglang": _ssd_sglang(mixer)}


def delta_peers(sizes: Delta) -> dict[str, Provider]:
    """Providers of a gated delta step besides ours, by name."""
    return {} if _peer_dir is None or sizes.per_channel else {"sglang": _delta_sglang()}


def _committed(mixer: Mixer, i: Inputs) -> Tensor:
    """Commit the path, as the step does, and return the state."""
    x, B = _split(mixer, i["old_xbc"])[:2]
    ops.ssd_commit(i["state"], x, i["old_dt"], i["A"], B, i["accepted"], None)
    return i["state"]  # type: ignore[no-any-return]


def _split(mixer: Mixer, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View the channels as x[b, n, h, p], B[b, n, g, s] and C[b, n, g, s]."""
    inner, span = mixer.heads * mixer.headdim, mixer.groups * mixer.dstate
    x, B, C = xbc.split((inner, span, span), -1)
    groups = (mixer.groups, mixer.dstate)
    return x.unflatten(-1, (mixer.heads, mixer.headdim)), B.unflatten(-1, groups), C.unflatten(-1, groups)


def _expanded(mixer: Mixer, i: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """A, D and the bias of the step sizes for every channel, as mamba-ssm's update takes them."""
    h, p, s = mixer.heads, mixer.headdim, mixer.dstate
    return i["A"][:, None, None].expand(h, p, s), i["D"][:, None].expand(h, p), i["bias"][:, None].expand(h, p)


def _ssd_sglang(mixer: Mixer) -> Provider:
    """Copy the accepted node's snapshot into the state, then go through the nodes, storing a snapshot each."""
    update = _sglang("mamba.triton_ops.mamba_ssm").selective_state_update
    scatter = _sglang("mamba.mamba_state_scatter_triton").fused_mamba_state_scatter_with_mask
    h, p, s = mixer.heads, mixer.headdim, mixer.dstate

    def run(i: Inputs) -> Tensor:
        x, B, C = _split(mixer, i["xbc"])
        batch, n = x.shape[:2]
        if "snapshots" not in i:  # the tree before left one a node; that of the accepted node is the committed state
            snapshots = i["state"].new_zeros(1, batch, n, h, p, s)
            last = i["path_lengths"].long() - 1
            i["last"] = i["path"].gather(1, last[:, None]).squeeze(1)
            snapshots[0, torch.arange(batch, device=x.device), i["last"].long()] = _committed(mixer, i)
            i["slots"] = torch.arange(batch, dtype=torch.int32, device=x.device)
            i["snapshots"], i["out"] = snapshots, torch.empty_like(x)
        scatter(i["state"][None], i["snapshots"], i["slots"], i["last"])
        A, D, bias = _expanded(mixer, i)
        update(
            i["state"], x, i["dt"][..., None].expand(-1, -1, -1, p), A, B, C, D=D, dt_bias=bias, dt_softplus=True,
            state_batch_indices=i["slots"], out=i["out"], disable_state_update=True,
            intermediate_states_buffer=i["snapshots"][0], cache_steps=n, retrieve_parent_token=i["parents"],
            intermediate_state_indices=i["slots"],
        )  # fmt: skip
        return i["out"]  # type: ignore[no-any-return]

    return run


def _delta_sglang() -> Provider:
    """The same for the gated delta rule; its states are [heads, value, key]."""
    update = _sglang("attention.fla.fused_recurrent").fused_recurrent_gated_delta_rule_update
    scatter = _sglang("mamba.mamba_state_scatter_triton").fused_mamba_state_scatter_with_mask

    def run(i: Inputs) -> Tensor:
        batch, n = i["parents"].shape
        if "snapshots" not in i:
            ops.gated_delta_commit(i["state"], i["stash_k"], i["stash_u"], i["stash_g"], i["accepted"], None)
            i["pool"] = i["state"].transpose(2, 3).contiguous()
            last = i["path_lengths"].long() - 1
            i["last"] = i["path"].gather(1, last[:, None]).squeeze(1)
            snapshots = i["pool"].new_zeros(1, batch, n, *i["pool"].shape[1:])
            snapshots[0, torch.arange(batch, device=last.device), i["last"].long()] = i["pool"]
            i["snapshots"], i["slots"] = snapshots, torch.arange(batch, dtype=torch.int32, device=last.device)
        scatter(i["pool"][None], i["snapshots"], i["slots"], i["last"])
        return update(  # type: ignore[no-any-return]
            i["q"], i["k"], i["v"], i["g"], i["beta"], initial_state_source=i["pool"],
            initial_state_indices=i["slots"], disable_state_update=True, intermediate_states_buffer=i["snapshots"][0],
            intermediate_state_indices=i["slots"], cache_steps=n, retrieve_parent_token=i["parents"],
        )  # fmt: skip

    return run


def _sglang(name: str) -> Any:
    """Load one of SGLang's kernel files by path, with empty stand-ins for the server around it."""
    assert _peer_dir is not None, "called only where --peer-dir is given"
    module = f"sglang.kernels.ops.{name}"
    if module in sys.modules:
        return sys.modules[module]
    stubs: dict[str, dict[str, Any]] = {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
        "sglang.kernels.ops.memory.ptr_table": {"make_ptr_table": None},
        "sglang.srt.utils.common": {
            "get_device_core_count": None,
            "torch_release": tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]),
        },
    }
    for stub, names in stubs.items():
        if stub not in sys.modules:
            sys.modules[stub] = types.ModuleType(stub)
            sys.modules[stub].__dict__.update(names)
    parts = module.split(".")
    for end in range(1, len(parts)):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(_peer_dir.joinpath(*parts[:end]))]
    return importlib.import_module(module)
