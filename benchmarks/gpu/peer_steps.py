"""One decoding step of mamba-ssm with its CUDA graph, at the shape of a Mamba-2 model, with random weights."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from benchmarks.gpu.models import free
from stree.bench.device_clock import time_launches
from stree.bench.records import Record

__all__ = ["mamba_ssm_step", "why_not"]

DEVICE = torch.device("cuda")


def why_not(config: Any, device: torch.device) -> str | None:
    """The reason why mamba-ssm cannot run a model here; None where it can."""
    if config.model_type != "mamba2":
        return "mamba-ssm has no such model"
    if device.type != "cuda":
        return "mamba-ssm needs a CUDA device"
    missing = [name for name in ("mamba_ssm", "causal_conv1d") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def mamba_ssm_step(config: Any, batch: int, context: int, dtype: torch.dtype) -> Record:
    """Time a one-token step, as its ``decode(cg=True)`` makes it less the sampling.

    Args:
        config: of a Mamba2 model of transformers.
        batch: sequences.
        context: committed tokens; the step does not depend on them.
        dtype: of weights and, as its decode has it, of states.

    Returns:
        A record with the latency, and dtype and bytes of what a step keeps and of the weights that it reads.
    """
    sizes = importlib.import_module("mamba_ssm.models.config_mamba").MambaConfig(
        d_model=config.hidden_size,
        n_layer=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        ssm_cfg={
            "layer": "Mamba2", "d_state": config.state_size, "headdim": config.head_dim, "ngroups": config.n_groups,
            "expand": config.expand, "d_conv": config.conv_kernel,
        },
        residual_in_fp32=config.residual_in_fp32,
        tie_embeddings=config.tie_word_embeddings,
    )  # fmt: skip
    head = importlib.import_module("mamba_ssm.models.mixer_seq_simple").MambaLMHeadModel
    generation = importlib.import_module("mamba_ssm.utils.generation")
    model = head(sizes, device=DEVICE, dtype=dtype)
    with torch.inference_mode():
        cache = generation.update_graph_cache(model, None, batch, context, context + 64)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        record = {"weight_bytes": weights, **_timed(cache, batch, context)}
    del model, cache
    free(DEVICE)
    return record


def _timed(cache: Any, batch: int, context: int) -> Record:
    """Time replays of its graph with the copies that its loop makes around them; say what it keeps."""
    tokens = torch.ones(batch, 1, dtype=torch.long, device=DEVICE)
    positions = torch.full_like(tokens, context)
    kept = [tensor for pair in cache.inference_params.key_value_memory_dict.values() for tensor in pair]
    return {
        "state_dtype": str(kept[-1].dtype)[6:],
        "state_bytes": sum(tensor.nbytes for tensor in kept),
        **time_launches(lambda: cache.run(tokens, positions, context), DEVICE),
    }
