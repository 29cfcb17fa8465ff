"""Loading a checkpoint, local or from the hub: transformers' own formats, and those of mamba-ssm.

``TreeLM`` patches the loaded model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig

from stree.models.families import config_of_text_model, family_of
from stree.models.heads.weights import SINGLE, checkpoint_file, read_index
from stree.models.mamba_in_llama import config_of_hybrid, load_hybrid, mixer_sizes
from stree.models.native import config_of_native, is_native, load_native

__all__ = ["load_config", "load_model", "raw_config", "reason_of", "torch_device", "torch_dtype", "weights_digest"]

VALUES = 64  # of a tensor, that are hashed
MOST_MTP_LAYERS = 1000
BAD_CONFIG = (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, StrictDataclassError)


def load_config(name_or_path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read the config of a checkpoint; a native one is mapped onto transformers'.

    Raises:
        ValueError: no checkpoint there, or one whose config is code that the caller does not trust.
        NotImplementedError: a native checkpoint that cannot be mapped.
    """
    raw = raw_config(name_or_path, trust_remote_code=trust_remote_code)
    try:
        if is_native(raw):
            return config_of_native(raw)
        if (sizes := mixer_sizes(name_or_path, raw)) is not None:
            return config_of_hybrid(raw, sizes)
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        _check_num_mtp_layers(config)
        return config
    except NotImplementedError:
        raise
    except BAD_CONFIG as error:
        raise _unreadable(name_or_path, error) from error


def load_model(
    name_or_path: str | Path,
    *,
    device: str | torch.device,
    dtype: str | torch.dtype,
    device_map: str | Mapping[str, Any] | None,
    tp_plan: str | Mapping[str, str] | None = None,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Load a checkpoint of a supported family; see ``TreeLM.from_pretrained``."""
    names_device = not isinstance(device, str) or device != "auto"
    if sum((device_map is not None, tp_plan is not None, names_device)) > 1:
        given = f"got {device!r}, {device_map!r} and {tp_plan!r}"
        raise ValueError(f"give one of a device, a device_map and a tp_plan: {given}")
    if tp_plan is not None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    elif device_map is None:
        device = torch_device(device)
    on_cpu = not torch.cuda.is_available() if device_map is not None else torch.device(device).type == "cpu"
    if not isinstance(dtype, str) or dtype != "auto":
        dtype = torch_dtype(dtype)
    elif on_cpu:
        dtype = torch.float32
    raw = raw_config(name_or_path, trust_remote_code=trust_remote_code)
    read = _reader(name_or_path, raw)
    if read is not None:
        if device_map is not None or tp_plan is not None:
            kinds = "native mamba-ssm checkpoints and MambaInLlama"
            raise NotImplementedError(f"device_map and tp_plan are not supported for {kinds}; give a device")
        return read().to(device) if dtype == "auto" else read().to(device, cast(torch.dtype, dtype))
    whole = load_config(name_or_path, trust_remote_code=trust_remote_code)
    config = config_of_text_model(whole)
    family_of(config)
    _check_not_modelopt(name_or_path, raw)
    if tp_plan is not None:
        _check_plan(config, tp_plan)
        placed: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan=tp_plan)}
    elif device_map is None and "quantization_config" in raw:
        placed = {"device_map": {"": device}}  # some quantised weights cannot be moved once they are loaded
    else:
        placed = {"device_map": device_map}
    own = {} if config is whole else {"config": whole}  # with what was written to the text model's
    model = _load(name_or_path, dtype=dtype, trust_remote_code=trust_remote_code, **own, **placed)
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise NotImplementedError(
            f"device_map {device_map!r} offloads layers, which trees cannot use; keep them in memory"
        )
    return model if placed != {"device_map": None} else model.to(device)


def _check_num_mtp_layers(config: Any) -> None:
    """Refuse a number of MTP layers that transformers cannot list; of other families it reads none or checks it."""
    number = getattr(config, "num_mtp_layers", 0) if config.model_type == "bailing_hybrid" else 0
    if not isinstance(number, int) or number > MOST_MTP_LAYERS:
        raise ValueError(
            f"num_nextn_predict_layers must be an integer of at most {MOST_MTP_LAYERS}, got {number!r:.80}"
        )


def _reader(name_or_path: str | Path, raw: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return what reads a checkpoint that is mapped onto transformers' classes; None for transformers' own formats."""
    if is_native(raw):
        return lambda: load_native(name_or_path, raw)
    sizes = mixer_sizes(name_or_path, raw)
    return None if sizes is None else lambda: load_hybrid(name_or_path, raw, sizes)


def _check_plan(config: Any, tp_plan: Any) -> None:
    """Refuse a plan of a family that transformers cannot shard, and one without several processes."""
    if tp_plan != "auto":
        raise ValueError(f"tp_plan must be 'auto', transformers' plan of the family, got {tp_plan!r}")
    if "WORLD_SIZE" not in os.environ and not torch.distributed.is_initialized():
        raise ValueError("tp_plan needs processes that torchrun started: torchrun --nproc-per-node N ...")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not (getattr(config, "base_model_tp_plan", None) or getattr(model_class, "_tp_plan", None)):
        raise NotImplementedError(
            f"transformers has no tp_plan for {config.model_type}; give each process a model of its own, or spread the "
            "layers with device_map='auto'"
        )


def _check_not_modelopt(name_or_path: str | Path, raw: Mapping[str, Any]) -> None:
    """Refuse weights in NVIDIA's ModelOpt format, of which transformers reads the config only."""
    config = raw.get("quantization_config") or {}
    is_listed = isinstance(config, dict) and config.get("quant_method") == "modelopt"
    if is_listed or checkpoint_file(name_or_path, "hf_quant_config.json") is not None:
        raise NotImplementedError(
            f"checkpoint {str(name_or_path)!r} is in NVIDIA's ModelOpt format, which transformers cannot load; use the "
            "model's bfloat16 upload, or one quantised with compressed-tensors or torchao"
        )


def _load(name_or_path: str | Path, **arguments: Any) -> Any:
    """Load through transformers; refuse weights that are missing, or of other shapes, which it would draw at random."""
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        index = read_index(name_or_path) if checkpoint_file(name_or_path, SINGLE) is None else None
        if index is not None and not isinstance(index.get("metadata"), dict):  # transformers writes to it
            raise ValueError("its index of safetensors files has no metadata, which may be {}")
        model, report = AutoModelForCausalLM.from_pretrained(name_or_path, **arguments)
    except Exception as error:  # safetensors, pickle and transformers each raise their own
        raise ValueError(f"checkpoint {str(name_or_path)!r} cannot be loaded: {reason_of(error)}") from error
    if report["mismatched_keys"]:
        name, given, wanted = min(report["mismatched_keys"])
        what = f"checkpoint {str(name_or_path)!r} must have {name} {[*wanted]}, got {[*given]}"
        raise ValueError(f"{what} ({len(report['mismatched_keys'])} weights differ)")
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(f"checkpoint {str(name_or_path)!r} lacks {len(report['missing_keys'])} weights: {missing}")
    return model


def raw_config(name_or_path: str | Path, *, trust_remote_code: bool = False) -> Mapping[str, Any]:
    """Return config.json as a dict; refuse one that needs the checkpoint's code.

    Raises:
        TypeError: neither a path nor a hub id.
        ValueError: no config there, one that cannot be read, or one that needs code.
    """
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise TypeError(f"name_or_path must be a folder or a hub id OWNER/NAME, got {name_or_path!r:.80}")
    if str(name_or_path).startswith(("/", ".", "~")) and not Path(name_or_path).exists():
        raise _unreadable(name_or_path, ValueError("there is no such folder"))
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name_or_path)
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(name_or_path, error) from error
    if not isinstance(raw, dict):
        raise _unreadable(name_or_path, TypeError(f"its config.json holds {type(raw).__name__}, not an object"))
    if not raw and checkpoint_file(name_or_path, "adapter_config.json") is not None:
        raise ValueError(
            f"checkpoint {str(name_or_path)!r} is an adapter of peft without its model: merge it into the model and "
            "save this, by merge_and_unload().save_pretrained(FOLDER), or give TreeLM the loaded PeftModel"
        )
    needs_code = "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING
    if needs_code and not trust_remote_code:
        raise ValueError(
            f"checkpoint {str(name_or_path)!r} would execute code of its own; "
            "pass trust_remote_code=True if you have read it and trust it"
        )
    return cast(Mapping[str, Any], raw)


def torch_device(device: Any) -> torch.device:
    """Return a device by its name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ValueError: torch does not have it.
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
        return torch.device(device)  # None, too, is refused
    except Exception as error:  # every backend has its own
        raise ValueError(f"device must be one that torch finds, or 'auto', got {device!r}: {error!s:.80}") from error


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a floating torch dtype by its name, or unchanged."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be 'auto', a floating torch dtype or its name, got {dtype!r}")
    return found


def _unreadable(name_or_path: str | Path, error: Exception) -> ValueError:
    """Make the error for a config that cannot be read."""
    return ValueError(f"no checkpoint that transformers can read at {str(name_or_path)!r}: {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Write in one line what another library has raised; its first line alone where that says something."""
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [""]
    said = f"{first} {others[0]}" if first.endswith(":") and others else first
    return f"{type(error).__name__}: {said}" if isinstance(error, LookupError) or not said else said


def weights_digest(*parts: torch.nn.Module | None) -> str:
    """Hash some values of every parameter, to tell weights of one architecture apart; quantised ones are left out."""
    found = hashlib.sha256()
    for part in filter(None, parts):
        for name, weight in part.named_parameters():
            if type(weight.data) is torch.Tensor:  # quantised ones may be of other classes
                some = weight.data.flatten()[:: max(1, weight.numel() // VALUES)]
                found.update(name.encode() + some.double().cpu().numpy().tobytes())
    return found.hexdigest()[:16]
