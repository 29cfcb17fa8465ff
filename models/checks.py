"""Checks of models and of arguments.

``check_path`` and ``check_first`` read values on the host; ``TreeLM`` skips them for trees on a device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stree.kernels.checks import checks_values, describe
from stree.models.patching import has_foreign_forward
from stree.tree import TokenTree

__all__ = [
    "check_commit",
    "check_first",
    "check_mixer",
    "check_path",
    "check_peft",
    "check_rotary",
    "check_rows",
    "is_integer",
    "model_change",
    "weight_places",
]

CONVOLUTION, UNIT = "conv_1d", "rg_lru"  # parts of RecurrentGemma's block whose weights the adapter uses directly
GROWING = ("dynamic", "longrope")  # rope types whose frequencies depend on the longest text of the batch
READ = ("dt_proj", "kv_b_proj")  # projections whose weights adapters use directly; others are called as modules
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PLAIN = (Tensor, nn.Parameter)


def is_integer(given: Any) -> bool:
    """Return whether a value is a tensor of integers."""
    return isinstance(given, Tensor) and not (
        given.is_floating_point() or given.is_complex() or given.dtype == torch.bool
    )


def check_mixer(path: str, mixer: Any) -> None:
    """Refuse a stateful module that is offloaded, has a quantised weight that trees read, or a changed forward.

    Raises:
        NotImplementedError: the message names the module and the reason.
    """
    kind = type(mixer).__name__
    for name, part in mixer.named_modules():
        where = f"{path}.{name} ({type(part).__name__})" if name else f"{path} ({kind})"
        is_wrapped = name == UNIT and not hasattr(type(part), "_rnn_scan")
        if is_wrapped or (name == CONVOLUTION and type(part).forward is not nn.Conv1d.forward):
            raise NotImplementedError(f"{where} is not the model's, whose weights trees use; merge the adapter into it")
        if name in ("", CONVOLUTION, UNIT) and has_foreign_forward(part):
            raise NotImplementedError(
                f"{where} has a replaced forward, which trees would not run; "
                "remove it, or change the layer's output with register_forward_hook"
            )
        is_dict = isinstance(part, nn.ModuleDict)  # of parametrizations; its ``weight`` may be a module
        if not is_dict and not isinstance(
            getattr(part, "weight", None), Tensor | None
        ):  # dynamic quantisation of torch
            raise NotImplementedError(f"{where} has no weight tensor, as quantised layers; trees need plain weights")
    if any(getattr(module.__dict__.get("_hf_hook"), "offload", False) for module in mixer.modules()):
        raise NotImplementedError(f"{kind} is offloaded; layers that keep a state must be in a device's memory")
    _check_plain(mixer)
    activation = getattr(mixer, "activation", "silu")
    if activation not in ("silu", None):
        raise NotImplementedError(f"{kind} has activation {activation!r}; only 'silu' is supported")


def _check_plain(mixer: Any) -> None:
    """Refuse quantised weights but those of projections that are called as modules."""
    for path, part in mixer.named_modules():
        is_called = hasattr(part, "in_features") and path not in READ
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            is_plain = tensor.dtype in DTYPES and (path not in READ or type(tensor) in PLAIN)
            if not is_plain and not is_called:
                raise NotImplementedError(
                    f"{path}{'.' * bool(path)}{name} of {type(mixer).__name__} holds {describe(tensor)}, quantised, "
                    "but trees read it; leave it out of the quantisation (modules_to_not_convert)"
                )


def check_peft(model: Any) -> None:
    """Refuse adapters of peft that change a text by more than the modules that trees call.

    Raises:
        NotImplementedError: prompt learning, whose virtual tokens are no part of the text, or an activated LoRA, whose
            place in the text only a call with the whole text determines.
    """
    # While a PeftModel generates, the model inside has the PeftModel's method, and only that leads to it.
    outer = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)
    for name, config in getattr(outer, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False) or getattr(config, "alora_invocation_tokens", None):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise NotImplementedError(
                f"the adapter {name!r} of peft ({kind}) learns virtual tokens or is activated by tokens of the text, "
                "which trees cannot follow; adapters that change modules, as plain LoRA, are supported"
            )


def check_rotary(model: Any) -> None:
    """Refuse rotary positions whose frequencies change as a text grows, because cached keys are not rotated again.

    Raises:
        NotImplementedError: the model has such positions.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in GROWING:
                raise NotImplementedError(
                    f"rotary positions of rope_type {kind!r} change with the longest text, and cached keys do not; "
                    "other types are supported"
                )


def weight_places(modules: Iterable[Any]) -> str:
    """Return the dtypes and devices of the weights of modules as text, to compare and to print."""
    weights = (weight for module in modules for weight in module._parameters.values() if weight is not None)
    places = {(weight.dtype, weight.device) for weight in weights}
    return ", ".join(sorted(f"{dtype} on {device}" for dtype, device in places))


def model_change(model: Any, patched_places: str, mixers: Iterable[Any]) -> str | None:
    """Describe a change of a model since it was patched that would make trees wrong.

    Args:
        model: to compare.
        patched_places: its ``weight_places`` when it was patched.
        mixers: the modules that were patched.

    Returns:
        None where weights have the same dtypes and devices, and the stateful layers are the same.
    """
    modules, patched = [*model.modules()], {id(mixer): type(mixer) for mixer in mixers}
    places = weight_places(modules)
    if places != patched_places:
        return f"the model was moved since it was patched: {places}, was {patched_places}"
    kinds = {*patched.values()}
    if patched.keys() != {id(module) for module in modules if type(module) in kinds}:
        return "layers of the model were replaced, added or removed since it was patched"
    return None


def check_rows(rows: Tensor, batch: int) -> None:
    """Raise ValueError unless rows are int[batch'] indices of a batch; values are checked where the host has them."""
    if not rows.numel():
        raise ValueError("batch_indices must name at least one sequence, got none")
    if rows.dim() != 1 or not is_integer(rows):
        raise ValueError(f"batch_indices must be int[batch], got {describe(rows)}")
    if checks_values(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
        raise ValueError(f"batch_indices must be in [0, {batch}), got {rows.tolist()}")


def check_path(tree: TokenTree, path: Tensor, path_lengths: Tensor) -> None:
    """Refuse paths that do not start at the root or in which a node is not the child of the previous one."""
    parents, n = tree.parents.tolist(), tree.parents.shape[1]
    for row, (nodes, length) in enumerate(zip(path.tolist(), path_lengths.tolist(), strict=True)):
        if not 0 <= length <= len(nodes):
            raise ValueError(f"path_lengths[{row}] must be in [0, {len(nodes)}], got {length}")
        previous = -1
        for node in nodes[:length]:
            if not 0 <= node < n:
                raise ValueError(f"path of row {row} must hold nodes in [0, {n}), got {node}")
            if previous == -1 and node != 0:
                raise ValueError(f"path of row {row} must start at the root, node 0, got {node}")
            if parents[row][node] != previous:
                raise ValueError(
                    f"path of row {row} goes from node {previous} to {node}, whose parent is {parents[row][node]}"
                )
            previous = node


def check_commit(path: Tensor, path_lengths: Tensor, batch: int) -> None:
    """Refuse paths and lengths of wrong shapes or dtypes."""
    are_integers = is_integer(path) and is_integer(path_lengths)
    if not are_integers or path.dim() != 2 or path.shape[0] != batch or path_lengths.shape != (batch,):
        raise ValueError(
            f"path must be int32[{batch}, m] and path_lengths int32[{batch}], "
            f"got {describe(path)} and {describe(path_lengths)}"
        )


def check_first(last: TokenTree | None, tree: TokenTree, first: int) -> None:
    """Refuse a tree whose nodes below ``first`` are not those of the last verified one."""
    if last is None or last.tokens.shape[1] < first:
        num_verified = 0 if last is None else last.tokens.shape[1]
        raise ValueError(f"first={first} needs {first} verified nodes in the pending tree, got {num_verified}")
    same = torch.equal(last.tokens[:, :first], tree.tokens[:, :first])
    if not (same and torch.equal(last.parents[:, :first], tree.parents[:, :first])):
        raise ValueError(f"nodes below first={first} must be those of the last verified tree, but they differ")
