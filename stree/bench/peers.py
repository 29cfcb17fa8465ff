"""Other libraries' own generation of the same text: transformers' ``generate`` and mamba-ssm's."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stree.bench.pair import Pair

__all__ = ["PEERS", "PeerRun"]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What another library generated.

    Attributes:
        tokens: new ones of each prompt.
        ttft_s: seconds to the first token, or None where that is not known.
        forwards: of the target, or None where each made one token.
    """

    tokens: list[list[int]]
    ttft_s: float | None = None
    forwards: int | None = None


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
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
    seed: int,
    **assisted: Any,
) -> PeerRun:
    """Generate with the unpatched copy; a batch of ragged prompts is left-padded.

    Args:
        pair: the models.
        prompts: token lists.
        new_tokens: of every sequence.
        temperature: 0 for greedy.
        seed: of torch's random numbers.
        assisted: options that choose a mode of speculation.
    """
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
        ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=0, streamer=streamer, **options, **assisted
    )
    first = streamer.times[1] - began if streamer is not None else None
    return PeerRun(out[:, width:].tolist(), first)


def run_lookup(
    pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int, *, drafted: int
) -> PeerRun:
    """Generate with prompt lookup: transformers drafts ``drafted`` tokens a step from the text so far."""
    return _run_assisted(pair, prompts, new_tokens, temperature, seed, prompt_lookup_num_tokens=drafted)


def run_assistant(
    pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int, *, drafted: int
) -> PeerRun:
    """Generate with the draft model as transformers' assistant, ``drafted`` tokens a step.

    Raises:
        NotImplementedError: there is no draft model, or transformers has no assisted generation for such a target.
    """
    assistant = pair.plain_drafter
    assistant.generation_config.num_assistant_tokens = drafted
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return _run_assisted(pair, prompts, new_tokens, temperature, seed, assistant_model=assistant)


def _run_assisted(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
    seed: int,
    **assisted: Any,
) -> PeerRun:
    """Generate in a mode of speculation, and count the target's forwards."""
    if len(prompts) > 1:
        raise NotImplementedError("transformers' assisted generation takes one prompt; use --batch-size 1")
    if pair.plain._is_stateful:
        raise NotImplementedError("transformers has no assisted generation for models with a recurrent state")
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    with pair.plain.register_forward_pre_hook(count):
        run = run_transformers(pair, prompts, new_tokens, temperature, seed, **assisted)
    return replace(run, forwards=forwards)


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
    return PeerRun(out[:, ids.shape[1] :].tolist())


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


PEERS: dict[str, Callable[..., PeerRun]] = {
    "transformers": run_transformers,
    "transformers-lookup": run_lookup,
    "transformers-assistant": run_assistant,
    "mamba-ssm": run_mamba_ssm,
}
