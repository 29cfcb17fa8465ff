"""Checkpoints of the mamba-ssm package, by mapping its config and its keys onto transformers' classes.

Weights are read as tensors only; no code of a checkpoint is run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Mamba2Config, MambaConfig, PreTrainedConfig

from stree.models.heads.weights import INDEX, SINGLE, checkpoint_file, read_tensors

__all__ = ["config_of_native", "is_native", "load_native", "place_weights", "read_weights"]

PICKLED = "pytorch_model.bin"
RENAMED = {"backbone.embedding.weight": "backbone.embeddings.weight"}
EPSILON = 1e-5  # of every norm in mamba-ssm
# Options of its mixers that only set how weights are initialised or which kernels run.
INERT = {
    "layer", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "conv_init", "A_init_range", "use_fast_path",
    "use_mem_eff_path", "sequence_parallel", "process_group",
}  # fmt: skip
# Options of its Mamba-2 for which transformers' class supports one value only.
FIXED = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False}


def is_native(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is one of mamba-ssm."""
    return "model_type" not in config and {"d_model", "n_layer", "vocab_size"} <= config.keys()


def config_of_native(config: Mapping[str, Any]) -> PreTrainedConfig:
    """Make the transformers config of a mamba-ssm one.

    Args:
        config: the content of config.json.

    Raises:
        NotImplementedError: attention layers, or an option that transformers' class does not have.
    """
    _check_layers(config)
    options = dict(config.get("ssm_cfg") or {})
    kind = options.get("layer", "Mamba1")
    if kind not in ("Mamba1", "Mamba2"):
        raise NotImplementedError(f"native layers must be Mamba1 or Mamba2, got {kind!r}")
    multiple = config.get("pad_vocab_size_multiple", 8)
    width = config["d_model"]
    common: dict[str, Any] = {
        "vocab_size": math.ceil(config["vocab_size"] / multiple) * multiple,
        "hidden_size": width,
        "num_hidden_layers": config["n_layer"],
        "layer_norm_epsilon": EPSILON,
        "conv_kernel": options.pop("d_conv", 4),
        "expand": options.pop("expand", 2),
        "use_bias": options.pop("bias", False),
        "use_conv_bias": options.pop("conv_bias", True),
        "residual_in_fp32": config.get("residual_in_fp32", True),
        "tie_word_embeddings": config.get("tie_embeddings", True),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    mapped = _mamba1(common, options) if kind == "Mamba1" else _mamba2(common, options)
    unknown = sorted(options.keys() - INERT)
    if unknown:
        raise NotImplementedError(f"option {unknown[0]}={options[unknown[0]]!r} of a native {kind} is not supported")
    return mapped


def _check_layers(config: Mapping[str, Any]) -> None:
    """Refuse attention layers, MLPs and LayerNorms."""
    for name, kind in (
        ("attn_layer_idx", "native hybrid checkpoints"),
        ("d_intermediate", "native checkpoints with an MLP"),
    ):
        if config.get(name):
            raise NotImplementedError(f"{kind} are not supported, got {name}={config[name]}")
    if not config.get("rms_norm", True):
        raise NotImplementedError("native checkpoints with LayerNorm are not supported, got rms_norm=False")


def load_native(name_or_path: str | Path, config: Mapping[str, Any]) -> Any:
    """Load a mamba-ssm checkpoint into a transformers model, in the dtype it was saved in.

    Args:
        name_or_path: folder or hub id.
        config: the content of config.json.

    Raises:
        NotImplementedError: as ``config_of_native``.
        ValueError: weights are missing, unknown or of another shape, or the file holds more than tensors.
    """
    from transformers import Mamba2ForCausalLM, MambaForCausalLM

    mapped = config_of_native(config)
    model_class = Mamba2ForCausalLM if isinstance(mapped, Mamba2Config) else MambaForCausalLM
    with torch.device("meta"):
        model = model_class(mapped)
    if (
        mapped.model_type == "mamba2"
        and mapped.n_groups > 1
        and not hasattr(model.backbone.layers[0].mixer.norm, "group_size")
    ):
        raise NotImplementedError(f"this transformers has no grouped norm in Mamba-2, got ngroups={mapped.n_groups}")
    found = {RENAMED.get(name, name): tensor for name, tensor in read_weights(name_or_path).items()}
    if mapped.tie_word_embeddings and "backbone.embeddings.weight" in found:
        found["lm_head.weight"] = found["backbone.embeddings.weight"]
    place_weights(model, found)
    return model


def place_weights(model: Any, found: Mapping[str, Tensor]) -> None:
    """Place the tensors of a checkpoint in a transformers model that was made on the meta device.

    Raises:
        ValueError: weights are missing, unknown or of another shape.
    """
    expected = model.state_dict()
    problems = [f"lacks {name}" for name in expected if name not in found]
    problems += [f"has {name}, which this architecture does not" for name in found if name not in expected]
    problems += [
        f"has {name} of shape {[*found[name].shape]}, expected {[*tensor.shape]}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if problems:
        raise ValueError(f"the native checkpoint {problems[0]}; {len(problems)} such weights")
    model.load_state_dict(found, assign=True)
    model.tie_weights()


def _mamba1(common: dict[str, Any], options: dict[str, Any]) -> MambaConfig:
    """Return the config of a Mamba-1 model; its options are removed from ``options``."""
    rank, size = options.pop("dt_rank", "auto"), options.pop("d_state", 16)
    return MambaConfig(**common, state_size=size, time_step_rank=rank)


def _mamba2(common: dict[str, Any], options: dict[str, Any]) -> Mamba2Config:
    """Return the config of a Mamba-2 model; its options are removed from ``options``."""
    inner = common["expand"] * common["hidden_size"]
    headdim = options.pop("headdim", 64)
    expected = {**FIXED, "d_ssm": inner}
    for name, value in expected.items():
        given = options.pop(name, None)
        if given not in (None, value):
            raise NotImplementedError(f"option {name}={given!r} of a native Mamba2 is not supported, only {value!r}")
    return Mamba2Config(
        **common,
        num_heads=inner // headdim,
        head_dim=headdim,
        state_size=options.pop("d_state", 128),
        n_groups=options.pop("ngroups", 1),
        chunk_size=options.pop("chunk_size", 256),
        time_step_limit=tuple(options.pop("dt_limit", (0.0, math.inf))),
    )


def read_weights(name_or_path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, in safetensors or pickled.

    Raises:
        ValueError: there are no weights, or a file that holds anything but tensors.
    """
    if checkpoint_file(name_or_path, SINGLE) or checkpoint_file(name_or_path, INDEX):
        return read_tensors(name_or_path, lambda _: True, "cpu")
    path = checkpoint_file(name_or_path, PICKLED)
    if path is None:
        raise ValueError(f"checkpoint {str(name_or_path)!r} has none of {SINGLE}, {INDEX} and {PICKLED}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip each raise their own
        raise ValueError(f"{PICKLED} cannot be read as tensors: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{PICKLED} must hold a dict of tensors, got {type(found).__name__}")
    return found
