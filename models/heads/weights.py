"""Reading some tensors of a checkpoint, local or from the hub, and no others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

__all__ = [
    "SINGLE", "assign", "checkpoint_file", "count_parameters", "draft_tokens", "fused_experts", "read_index",
    "read_tensors", "tensor_files",
]  # fmt: skip

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def tensor_files(source: str | Path) -> dict[str, str]:
    """Map the name of every tensor of a checkpoint to the safetensors file that holds it.

    Raises:
        ValueError: no safetensors there, or a file that cannot be read.
    """
    index = read_index(source)
    if index is not None:
        return dict(index["weight_map"])
    single = checkpoint_file(source, SINGLE)
    if single is None:
        raise ValueError(f"checkpoint {str(source)!r} has neither {SINGLE} nor {INDEX}")
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), SINGLE)


def read_index(source: str | Path) -> dict[str, Any] | None:
    """Read the index of a checkpoint's safetensors files, or return None where it has none.

    Raises:
        ValueError: one that is no JSON object, or whose weight_map does not map names to files.
    """
    path = checkpoint_file(source, INDEX)
    if path is None:
        return None
    try:
        index = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path} must hold a JSON object with a weight_map of tensors and their files")
    return cast(dict[str, Any], index)


def read_tensors(source: str | Path, is_wanted: Callable[[str], bool], device: str) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose names are wanted; only the files that hold them are opened.

    On the device "meta", only their shapes are read.

    Raises:
        ValueError: a file is missing, or cannot be read.
    """
    names = {name: file for name, file in tensor_files(source).items() if is_wanted(name)}
    tensors: dict[str, Tensor] = {}
    for file in sorted({*names.values()}):
        path = checkpoint_file(source, file)
        if path is None:
            raise ValueError(f"checkpoint {str(source)!r} lacks {file}, which its index names")
        is_empty = device == "meta"
        with _opened(path, "cpu" if is_empty else device) as shard:
            held = {*shard.keys()}
            for name in (name for name, place in names.items() if place == file):
                if name not in held:
                    raise ValueError(f"{file} of checkpoint {str(source)!r} lacks {name}, which the index places there")
                shape = shard.get_slice(name).get_shape() if is_empty else None
                tensors[name] = shard.get_tensor(name) if shape is None else torch.empty(shape, device=device)
    return tensors


def count_parameters(source: str | Path, files: Mapping[str, str]) -> int:
    """Count the parameters of some tensors of a checkpoint, given with their files; only headers are read.

    Raises:
        ValueError: a file is missing, or cannot be read.
    """
    total = 0
    for file in sorted({*files.values()}):
        path = checkpoint_file(source, file)
        if path is None:
            raise ValueError(f"checkpoint {str(source)!r} lacks {file}, which its index names")
        with _opened(path) as shard:
            held = (name for name, place in files.items() if place == file)
            total += sum(math.prod(shard.get_slice(name).get_shape()) for name in held)
    return total


def fused_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the weights of single experts as transformers' modules hold them; other tensors are passed on.

    ``gate_up_proj`` is [experts, 2 x intermediate, hidden], ``up_proj`` alone where experts have no gate.
    """
    rest = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    found: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            place, number, part = match.groups()
            found.setdefault(place, {}).setdefault(part, {})[int(number)] = tensor
    for place, parts in found.items():
        stacks = {part: torch.stack([part_of[number] for number in sorted(part_of)]) for part, part_of in parts.items()}
        if "gate_proj" in stacks:
            stacks["gate_up_proj"] = torch.cat([stacks.pop("gate_proj"), stacks.pop("up_proj")], 1)
        rest |= {f"{place}.{part}": stack for part, stack in stacks.items()}
    return rest


def assign(parts: nn.ModuleDict, tensors: Mapping[str, Tensor], what: str) -> None:
    """Place tensors in the modules of a head that have none yet; those that have, such as the target's, are left alone.

    Args:
        parts: modules, those without weights on the meta device.
        tensors: by the part's name and the name in it.
        what: names the checkpoint in errors.

    Raises:
        ValueError: tensors are missing, too many, or of other shapes.
    """
    wanted = {name: [*value.shape] for name, value in parts.state_dict().items() if value.is_meta}
    given = {name: [*value.shape] for name, value in tensors.items()}
    differing = sorted(name for name in {*wanted, *given} if wanted.get(name) != given.get(name))
    if differing:
        name = differing[0]
        raise ValueError(
            f"{what} must have {name.removeprefix('base.')} {wanted.get(name, 'not at all')}, "
            f"got {given.get(name, 'none')} ({len(differing)} tensors differ)"
        )
    parts.load_state_dict(dict(tensors), strict=False, assign=True)


def draft_tokens(offsets: Tensor, count: int, vocab_size: int, what: str) -> Tensor:
    """Return the token of each of a head's logits, which is its index and an offset: int64[count].

    Args:
        offsets: the tensor d2t.
        count: logits.
        vocab_size: of the target.
        what: names the checkpoint in errors.

    Raises:
        ValueError: another number of offsets, or tokens that the target does not have.
    """
    if offsets.shape != (count,):
        raise ValueError(f"{what} must have d2t [{count}], got {[*offsets.shape]}")
    tokens = offsets.long() + torch.arange(count, device=offsets.device)
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"{what} must map its tokens below {vocab_size} by d2t")
    return tokens


def checkpoint_file(source: str | Path, name: str) -> str | None:
    """Local path of a file of a checkpoint, or None."""
    path: str | None = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=True
    )
    return path


def _opened(path: str, device: str = "cpu") -> safe_open:
    """Open a safetensors file.

    Raises:
        ValueError: it is truncated, or something else.
    """
    try:
        return safe_open(path, "pt", device=device)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
