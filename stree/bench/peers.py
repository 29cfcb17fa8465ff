"""Other libraries' own generation of the same text: transformers' ``generate`` and mamba-ssm's."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MaxLengthCriteria

from stree.bench.pair import Pair

__all__ = ["PEERS", "PeerRun"]


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What another library generated.

    Attributes:
        tokens: new ones of each prompt.
        ttft_s: seconds to the first token, or None where that is not known.
        accepted: drafted tokens that each step accepted, before the text was cut, without the step that read the
            prompt; or None where nothing was drafted.
    """

    tokens: list[list[int]]
    ttft_s: float | None = None
    accepted: list[int] | None = None


class _Passes:
    """A streamer that notes when the tokens of each pass of the target come, and how many they are.

    Attributes:
        times: of the passes; transformers puts the prompt first, whose time is no pass's.
        counts: tokens that came at these times.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        """Note the time; the tokens were read, so the device is synchronised."""
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left to do."""


def run_transformers(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
    seed: int,
    *,
    drafted: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    **assisted: Any,
) -> PeerRun:
    """Generate with the unpatched copy; a batch of ragged prompts is left-padded.

    Speculation makes its last draft as long as every other one, as ours does, and what is behind the end is cut off.
    Otherwise transformers shortens it, and tau would depend on how long the text is.

    Args:
        pair: the models.
        prompts: token lists.
        new_tokens: of every sequence.
        temperature: 0 for greedy.
        seed: of torch's random numbers.
        drafted: tokens that a mode of speculation drafts a step.
        top_k: tokens that sampling keeps, or None for all.
        top_p: probability of the smallest set that sampling keeps, or None for all.
        assisted: options that choose this mode.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[*[0] * (width - len(prompt)), *prompt] for prompt in prompts], device=pair.target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=ids.device)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    streamer = _Passes() if len(prompts) == 1 else None
    torch.manual_seed(seed)
    began = time.perf_counter()
    out = pair.plain.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens + drafted, pad_token_id=0, streamer=streamer,
        stopping_criteria=[MaxLengthCriteria(width + new_tokens)], **options, **assisted,
    )  # fmt: skip
    first = streamer.times[1] - began if streamer is not None else None
    accepted = [count - 1 for count in streamer.counts[2:]] if assisted and streamer is not None else None
    return PeerRun(out[:, width : width + new_tokens].tolist(), first, accepted)


def run_lookup(pair: Pair, prompts: Sequence[Sequence[int]], *case: Any, drafted: int, **kept: Any) -> PeerRun:
    """Generate with prompt lookup: transformers drafts ``drafted`` tokens a step from the text so far."""
    _check_assisted(pair, prompts)
    return run_transformers(pair, prompts, *case, drafted=drafted, prompt_lookup_num_tokens=drafted, **kept)


def run_assistant(pair: Pair, prompts: Sequence[Sequence[int]], *case: Any, drafted: int, **kept: Any) -> PeerRun:
    """Generate with the draft model as transformers' assistant, ``drafted`` tokens a step.

    Raises:
        NotImplementedError: there is no draft model, or transformers has no assisted generation for such a target.
    """
    assistant = pair.plain_drafter
    assistant.generation_config.update(
        num_assistant_tokens=drafted, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    _check_assisted(pair, prompts)
    return run_transformers(pair, prompts, *case, drafted=drafted, assistant_model=assistant, **kept)


def _check_assisted(pair: Pair, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse what transformers' modes of speculation cannot run."""
    if len(prompts) > 1:
        raise NotImplementedError("transformers' assisted generation takes one prompt; use --batch-size 1")
    if pair.plain._is_stateful:
        raise NotImplementedError("transformers has no assisted generation for models with a recurrent state")


def run_mamba_ssm(
    pair: Pair, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int, *,
    top_k: int | None = None, top_p: float | None = None,
) -> PeerRun:  # fmt: skip
    """Generate with mamba-ssm and its CUDA graphs, from a checkpoint in its own format.

    Raises:
        NotImplementedError: the package, a CUDA device or such a checkpoint is missing, or prompts are ragged.
    """
    model = _mamba_model(pair)
    if len({len(prompt) for prompt in prompts}) > 1:
        raise NotImplementedError("mamba-ssm generates for prompts of one length only; use --batch-size 1")
    ids = torch.tensor([list(prompt) for prompt in prompts], device=pair.target.device)
    sampled = {"top_k": top_k or 0, "top_p": top_p or 0.0, "temperature": temperature}
    options = {"top_k": 1} if temperature == 0 else sampled
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
