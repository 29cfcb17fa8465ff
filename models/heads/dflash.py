"""Reading one-shot draft heads: DFlash, DSpark and DFlash2, in the layouts of z-lab and of speculators.

z-lab's layout, which DeepSpec, SpecForge and LiquidAI write too, is a Qwen3 config with options in ``dflash_config`` or
beside it, and the tensors of `stree.models.heads.dflash_layers` under their own names; its ``target_layer_ids`` count
from the output of the first layer, so id i is our layer i + 1.  In speculators' layout ``aux_hidden_state_layer_ids``
are our numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Qwen3Config
from transformers.utils import cached_file

from stree.checks import check_counts
from stree.models.heads.dflash_head import OneShotHead
from stree.models.heads.dflash_layers import BlockConfig, BlockModel
from stree.models.heads.weights import assign, draft_tokens, read_tensors
from stree.models.hidden_states import check_hidden_layers
from stree.models.tree_lm import TreeLM

__all__ = ["OneShotHead", "load_dflash", "speculators_config"]

KINDS = ("dflash", "dspark", "dflash2")
# Copies of the target's weights, masks of training, and the confidence head, which no tree reads.
UNREAD = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.", "t2d", "confidence_head.")
JETSPEC = ("causal_head", "draft_shift")


def load_dflash(source: str | Path, target: TreeLM) -> OneShotHead:
    """Load a one-shot head.

    Args:
        source: folder or hub id of the head's checkpoint.
        target: the head is placed on its device, in its dtype, and uses its embedding and output head.

    Raises:
        NotImplementedError: a variant that is not known.
        ValueError: the checkpoint cannot be read, or was made for a target of other sizes.
    """
    file = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        raise ValueError(f"draft head {str(source)!r} has no config.json")
    published = json.loads(Path(file).read_text())
    config = speculators_config(published) if "speculators_model_type" in published else _z_lab(published)
    _check_target(config, published, source, target)
    tensors = read_tensors(source, lambda name: not name.startswith(UNREAD), str(target.device))
    offsets, what = tensors.pop("d2t", None), f"draft head {str(source)!r}"
    draft_ids = None
    if config.draft_vocab is None:
        tensors.pop("lm_head.weight", None)  # the target's
    elif offsets is None:
        raise ValueError(f"{what} has {config.draft_vocab} logits but no tensor d2t of their tokens")
    else:
        draft_ids = draft_tokens(offsets, config.draft_vocab, target.vocab_size, what)
    model = BlockModel(config)
    named = {f"base.{_renamed(name)}": value.to(target.dtype) for name, value in tensors.items()}
    assign(nn.ModuleDict({"base": model}), named, what)
    model.rotary_emb = type(model.rotary_emb)(config.layers).to(target.device)
    if published.get("rope_is_neox_style") is False:
        _halve_pairs(model)
    return OneShotHead(model.requires_grad_(False), config, target, draft_ids)


def _z_lab(published: Mapping[str, Any]) -> BlockConfig:
    """Read z-lab's layout, whose options are in ``dflash_config`` or beside it."""
    options: dict[str, Any] = {**published, **published.get("dflash_config", {})}
    name = (published.get("architectures") or ["DFlashDraftModel"])[0]
    unknown = [key for key in JETSPEC if options.get(key)]
    if unknown or options.get("projector_type", "dflash") not in KINDS:
        what = unknown[0] if unknown else f"projector_type {options['projector_type']!r}"
        raise NotImplementedError(f"one-shot heads with {what} are not known; known are {', '.join(KINDS)}")
    layers = Qwen3Config.from_dict(dict(published))
    is_sliding, is_causal = _is_sliding(layers), published.get("is_causal")
    is_dspark = "DSpark" in name or options.get("projector_type") == "dspark" or bool(options.get("markov_rank"))
    draft_vocab = options.get("draft_vocab_size") or layers.vocab_size
    return BlockConfig(
        layers,
        hidden_layers=tuple(layer + 1 for layer in _required(options, "target_layer_ids")),
        block_size=int(options.get("block_size", 16)),
        mask_token_id=int(_required(options, "mask_token_id")),
        draft_vocab=None if draft_vocab == layers.vocab_size else int(draft_vocab),
        predicts_next=bool(options.get("sample_from_anchor", is_dspark)),
        is_causal=is_sliding if is_causal is None else (bool(is_causal),) * len(is_sliding),
        windows=tuple(layers.sliding_window if sliding else None for sliding in is_sliding),
        window_from_anchor=False,
        embedding_scale=float(options.get("input_embedding_scale", 1.0)),
        logit_scale=float(options.get("output_multiplier", 1.0)),
        softcap=float(options.get("final_logit_softcapping") or 0.0),
        conv=(options["conv_kernel_size"], options["conv_group_size"]) if "conv_kernel_size" in options else None,
        selector=(options["selector_rank"], options["selector_top_k"]) if "selector_rank" in options else None,
        markov=_markov(options, 0),
    )


def speculators_config(published: Mapping[str, Any]) -> BlockConfig:
    """Read speculators' layout, whose defaults are those of its config classes."""
    kind = published["speculators_model_type"]
    if kind not in KINDS:
        raise NotImplementedError(f"one-shot heads of speculators_model_type {kind!r} are not known; known are {KINDS}")
    sizes = dict(_required(published, "transformer_layer_config"))
    layers = AutoConfig.for_model(sizes.pop("model_type", "qwen3"), **sizes)
    is_sliding, draft_vocab = _is_sliding(layers), published.get("draft_vocab_size", 32000)
    is_causal = not published.get("sliding_window_non_causal", kind == "dflash2")
    return BlockConfig(
        layers,
        hidden_layers=tuple(_required(published, "aux_hidden_state_layer_ids")),
        block_size=int(published.get("block_size", 8)),
        mask_token_id=int(_required(published, "mask_token_id")),
        draft_vocab=None if draft_vocab == layers.vocab_size else int(draft_vocab),
        predicts_next=_predicts_next(published),
        is_causal=tuple(sliding and is_causal for sliding in is_sliding),
        windows=tuple(layers.sliding_window if sliding else None for sliding in is_sliding),
        window_from_anchor=True,
        conv=(published.get("conv_kernel_size", 2), published.get("conv_group_size", 16))
        if kind == "dflash2"
        else None,
        selector=(published.get("selector_rank", 256), published.get("selector_top_k", 16))
        if kind == "dflash2"
        else None,
        markov=_markov(published, 256) if kind == "dspark" else None,
    )


def _predicts_next(published: Mapping[str, Any]) -> bool:
    """Return whether position k of a block of speculators' layout predicts the token at k + 1.

    DSpark heads that were trained before ``sample_from_anchor`` existed predict their own tokens.  They propose one
    token less than a block has positions.
    """
    if "sample_from_anchor" in published:
        return bool(published["sample_from_anchor"])
    methods = (published.get("speculators_config") or {}).get("proposal_methods") or [{}]
    block_size = int(published.get("block_size", 8))
    is_dspark = published["speculators_model_type"] == "dspark"
    return is_dspark and int(methods[0].get("speculative_tokens") or block_size) >= block_size


def _required(options: Mapping[str, Any], name: str) -> Any:
    """Return an entry of a config that must be there."""
    if options.get(name) is None:
        raise ValueError(f"the config of a one-shot draft head must have {name}, got {', '.join(sorted(options))}")
    return options[name]


def _markov(options: Mapping[str, Any], default: int) -> tuple[int, str] | None:
    """Return rank and kind of DSpark's bias, or None where it is switched off."""
    rank, kind = int(options.get("markov_rank", default)), options.get("markov_head_type", "vanilla")
    if rank and kind not in ("vanilla", "gated"):
        raise NotImplementedError(f"markov_head_type must be 'vanilla' or 'gated', got {kind!r}")
    return (rank, kind) if rank else None


def _is_sliding(layers: Any) -> tuple[bool, ...]:
    """Return which layers have sliding attention."""
    kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    return tuple(kind == "sliding_attention" for kind in kinds)


def _check_target(config: BlockConfig, published: Mapping[str, Any], source: Any, target: TreeLM) -> None:
    """Refuse a head that was made for a target of other sizes."""
    options = {**published, **published.get("dflash_config", {})}
    size = target.model.get_input_embeddings().weight.shape[1]
    pairs = {
        "hidden_size": (config.layers.hidden_size, size),
        "target_hidden_size": (options.get("target_hidden_size") or size, size),
        "vocab_size": (config.layers.vocab_size, target.vocab_size),
        "num_target_layers": (options.get("num_target_layers") or target.num_layers, target.num_layers),
    }
    for name, (given, wanted) in pairs.items():
        if given != wanted:
            raise ValueError(f"draft head {str(source)!r} must have {name} {wanted}, the target's, got {given}")
    if config.block_size < (least := 2 - config.predicts_next):  # the anchor, and a position that predicts
        what = f"draft head {str(source)!r} must have a block_size of at least {least}"
        raise ValueError(f"{what}, got {config.block_size}")
    if not 0 <= config.mask_token_id < target.vocab_size:
        what = f"draft head {str(source)!r} must have a mask_token_id below {target.vocab_size}"
        raise ValueError(f"{what}, got {config.mask_token_id}")
    check_counts(block_size=config.block_size, below=config.layers.max_position_embeddings + 1)
    if config.selector is not None:
        check_counts(selector_top_k=config.selector[1], below=(config.draft_vocab or target.vocab_size) + 1)
    check_hidden_layers(config.hidden_layers, target.num_layers)


def _renamed(name: str) -> str:
    """Return the name of a tensor without what some writers add."""
    name = name.removeprefix("model.")
    return name.removesuffix(".weight") if "codebook" in name else name


def _halve_pairs(model: BlockModel) -> None:
    """Reorder queries and keys whose rotary pairs are neighbours, so that pairs are half a head apart.

    Scores do not change when queries and keys are reordered alike.
    """
    for layer in model.layers:
        attention: Any = layer.self_attn
        order = torch.arange(attention.head_dim).view(-1, 2).T.flatten()
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.data = norm.weight.data[order]
        for proj in (attention.q_proj, attention.k_proj):
            for part in (proj.weight, proj.bias) if proj.bias is not None else (proj.weight,):
                part.data = part.data.unflatten(0, (-1, attention.head_dim))[:, order].flatten(0, 1)
