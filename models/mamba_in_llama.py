"""Checkpoints of MambaInLlama (arXiv 2408.15237): Llama layers in which Mamba-2 mixers take the place of attention.

A layer of these models is a layer of transformers' Bamba, so the checkpoint is mapped onto that class.  The authors'
mixer has fewer heads of x and B than of C, as grouped-query attention has of keys and values, and repeats them after
the convolution.  Repeating the rows of the projection and the convolution's channels gives the same numbers, which
takes more memory for these weights: of Llama-8B's sizes, 1.6 times that of the mixer's input projection.

The layout is that of the authors' repository, github.com/jxiw/MambaInLlama: beside Llama's config.json and weights a
mamba_config.json with d_model, d_inner, d_xb, attn_layers, n_layer and ssm_cfg; the mixers' weights are
``model.layers.N.mamba.*``, with z, x, B, C and dt in this order in ``in_proj``.  No code of a checkpoint is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BambaConfig, GenerationConfig, LlamaConfig

from stree.models.heads.weights import checkpoint_file
from stree.models.native import place_weights, read_weights

__all__ = ["config_of_hybrid", "load_hybrid", "mixer_sizes"]

MIXER_CONFIG = "mamba_config.json"
EPSILON = 1e-5  # of the mixer's gated norm, whatever the other norms have
RENAMED = {
    ".mlp.": ".feed_forward.",
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    "model.norm.": "model.final_layernorm.",
}
SHARED = (  # what a Bamba's config has of a Llama's
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "head_dim", "attention_bias",
    "mlp_bias", "dtype", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
# Options of the mixer that only set how weights are initialised or which kernels run.
INERT = {"expand", "headdim", "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "use_mem_eff_path"}
# Options that Bamba's mixer supports one value of.
FIXED = {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False, "bias": False, "d_ssm": None}


def mixer_sizes(name_or_path: str | Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the content of mamba_config.json beside a Llama's config.json; None for other checkpoints.

    Raises:
        ValueError: it cannot be read.
    """
    if config.get("model_type") != "llama" or (path := checkpoint_file(name_or_path, MIXER_CONFIG)) is None:
        return None
    try:
        sizes = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        sizes = None
    if not isinstance(sizes, dict) or not {"d_inner", "d_xb", "attn_layers"} <= sizes.keys():
        raise ValueError(f"{MIXER_CONFIG} of {str(name_or_path)!r} must name d_inner, d_xb and attn_layers")
    return sizes


def config_of_hybrid(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> BambaConfig:
    """Make the config of the Bamba that a checkpoint is mapped onto.

    Args:
        config: the content of config.json, a Llama's.
        sizes: that of mamba_config.json.

    Raises:
        NotImplementedError: Mamba-1 mixers, or an option that Bamba does not have.
    """
    llama = LlamaConfig.from_dict(dict(config))
    options = dict(sizes.get("ssm_cfg") or {})
    heads, inner = options.pop("ngroups", None), sizes["d_inner"]
    if heads is None:
        raise NotImplementedError(f"{MIXER_CONFIG} must have Mamba-2 mixers; Mamba-1 in Llama layers is not supported")
    dstate = options.pop("d_state", 128)
    if heads * dstate != inner or inner % llama.hidden_size or sizes["d_xb"] % dstate:
        raise NotImplementedError(
            f"d_inner must be ngroups x d_state and a multiple of hidden_size, d_xb a multiple of d_state; got d_inner "
            f"{inner}, ngroups {heads}, d_state {dstate}, hidden_size {llama.hidden_size}, d_xb {sizes['d_xb']}"
        )
    if llama.hidden_act != "silu":
        raise NotImplementedError(f"hidden_act of a MambaInLlama must be 'silu', got {llama.hidden_act!r}")
    for name, value in FIXED.items():
        if options.get(name, value) not in (None, value):
            raise NotImplementedError(f"option {name}={options[name]!r} of a MambaInLlama mixer is not supported")
    mapped = BambaConfig(
        **{name: getattr(llama, name) for name in SHARED},
        rope_parameters={**llama.rope_parameters, "partial_rotary_factor": 1.0},
        attn_layer_indices=sorted(sizes["attn_layers"]), mamba_n_heads=heads, mamba_d_head=dstate,
        mamba_d_state=dstate, mamba_n_groups=heads, mamba_expand=inner // llama.hidden_size,
        mamba_d_conv=options.pop("d_conv", 4), mamba_conv_bias=options.pop("conv_bias", True), mamba_proj_bias=False,
        mamba_chunk_size=options.pop("chunk_size", 256),
        time_step_limit=tuple(options.pop("dt_limit", (0.0, math.inf))),
    )  # fmt: skip
    unknown = sorted(options.keys() - INERT - FIXED.keys() - {"repeat_kv_before_conv"})
    if unknown:
        raise NotImplementedError(
            f"option {unknown[0]}={options[unknown[0]]!r} of a MambaInLlama mixer is not supported"
        )
    return mapped


def load_hybrid(name_or_path: str | Path, config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Any:
    """Load a checkpoint into a Bamba, in the dtype it was saved in.

    Args:
        name_or_path: folder or hub id.
        config: as for ``config_of_hybrid``.
        sizes: likewise.

    Raises:
        NotImplementedError: as ``config_of_hybrid``.
        ValueError: weights are missing, unknown or of another shape, or a file that holds more than tensors.
    """
    from transformers import BambaForCausalLM

    mapped = config_of_hybrid(config, sizes)
    with torch.device("meta"):
        model = BambaForCausalLM(mapped)
    for module in model.modules():
        if type(module).__name__ == "BambaRMSNormGated":
            if getattr(module, "group_size", None) != mapped.mamba_d_state:
                raise NotImplementedError("this transformers has no grouped norm in Bamba, which MambaInLlama has")
            module.variance_epsilon = EPSILON
    found = _expanded(read_weights(name_or_path), sizes, mapped)
    if mapped.tie_word_embeddings and "model.embed_tokens.weight" in found:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    place_weights(model, found)
    model.model.rotary_emb = type(model.model.rotary_emb)(mapped)  # its buffers are no part of a checkpoint
    if (path := checkpoint_file(name_or_path, "generation_config.json")) is not None:
        model.generation_config = GenerationConfig.from_pretrained(Path(path).parent)
    return model


def _expanded(tensors: Mapping[str, Tensor], sizes: Mapping[str, Any], mapped: BambaConfig) -> dict[str, Tensor]:
    """Rename tensors, and repeat x and B of mixers until there is one for every head."""
    inner, shared, dstate = sizes["d_inner"], sizes["d_xb"], mapped.mamba_d_state

    def repeated(part: Tensor) -> Tensor:
        by_head = part.unflatten(0, (-1, dstate))
        return torch.cat([head for head in by_head for _ in range(mapped.mamba_n_heads // len(by_head))])

    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name.endswith(".mamba.in_proj.weight"):
            z, x, B, C, dt = tensor.split([inner, shared, shared, inner, mapped.mamba_n_heads])
            tensor = torch.cat((z, repeated(x), repeated(B), C, dt))
        elif ".mamba.conv1d." in name and not (sizes.get("ssm_cfg") or {}).get("repeat_kv_before_conv"):
            x, B, C = tensor.split([shared, shared, inner])
            tensor = torch.cat((repeated(x), repeated(B), C))
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found
