"""Other libraries' own generation of the same text: transformers' ``generate`` and mamba-ssm's."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stree.bench.pair import Pair

__all__ = ["PEERS", "PeerRun"]

PeerRun = tuple[list[list[int]], float | None]  # new tokens of each prompt, and seconds to the first where known


class _FirstToken:
    """A streamer that notes when the first new token comes; transformers puts the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note the time; the tokens were read, so the device is synchronised."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def run_transformers(
    pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int
) -> PeerRun:
    """Generate with the unpatched copy; a batch of ragged prompts is left-padded."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*[0] * (width - len(prompt)), *prompt] for prompt in prompts], device=pair.target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    streamer = _FirstToken() if len(prompts) == 1 else None
    torch.manual_seed(seed)
    began = time.perf_counter()
    out = pair.plain.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=0, streamer=streamer, **options
    )
    first = streamer.times[1] - began if streamer is not None else None
    return out[:, width:].tolist(), first


def run_mamba_ssm(
    pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int
) -> PeerRun:
    """Generate with mamba-ssm and its CUDA graphs, from a checkpoint in its own format.

    Raises:
        NotImplementedError: the package, a CUDA device or such a checkpoint is missing, or prompts are ragged.
    """
    model = _mamba_model(pair)
    if len({len(prompt) for prompt in prompts}) > 1:
        raise NotImplementedError("mamba-ssm generates for prompts of one length only; use --batch-size 1")
    ids = torch.tensor([list(prompt) for prompt in prompts], device=pair.target.device)
    options = {"top_k": 1} if temperature == 0 else {"top_k": 0, "temperature": temperature}
    torch.manual_seed(seed)
    out = model.generate(ids, max_length=ids.shape[1] + new_tokens, cg=True, **options)
    torch.cuda.synchronize(ids.device)
    return out[:, ids.shape[1] :].tolist(), None


_MODELS: dict[tuple[str, str], Any] = {}


def _mamba_model(pair: Pair) -> Any:
    """Load the target into mamba-ssm, once."""
    if pair.target.device.type != "cuda":
        raise NotImplementedError("mamba-ssm needs a CUDA device")
    try:
        module = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    except ImportError as error:
        raise NotImplementedError(f"mamba-ssm is not installed: {error}") from error
    config = Path(pair.source, "config.json")
    if not config.is_file() or "ssm_cfg" not in json.loads(config.read_text(encoding="utf-8")):
        raise NotImplementedError(f"mamba-ssm loads checkpoints of its own format; {pair.source!r} is none")
    key = (pair.source, pair.dtype)
    if key not in _MODELS:
        _MODELS[key] = module.MambaLMHeadModel.from_pretrained(
            pair.source, device=pair.target.device, dtype=pair.target.dtype
        )
    return _MODELS[key]


PEERS: dict[str, Callable[[Pair, Sequence[Sequence[int]], int, float, int], PeerRun]] = {
    "transformers": run_transformers,
    "mamba-ssm": run_mamba_ssm,
}
