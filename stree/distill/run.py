"""Making a drafter from a target and texts: the parts of the recipe in their order, then measuring and saving."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from stree.distill.continuations import Writing, write_continuations
from stree.distill.folder import METRICS, RunFolder
from stree.distill.heads import HEADS, new_head
from stree.distill.heads.network import HeadNetwork, Outputs, head_loss, outputs_of
from stree.distill.network import build, check_forward, drafter_config, use_training_forward
from stree.distill.report import card, measure_probs, measure_tau
from stree.distill.settings import Settings
from stree.distill.text import Batches, Corpus, distinct, encode, hold_out
from stree.distill.training import Budget, Logits, compiler, distill_loss, matmul_dtype, probs_of, text_loss, train
from stree.drafters import ModelDrafter, load
from stree.files import alone_in, failures_named
from stree.models.loading import weights_digest
from stree.models.tree_lm import TreeLM

__all__ = ["distill_drafter", "fit", "fit_head", "save_model"]

GENERATED_PASSES = 8.0  # passes over target-generated text, after which it is left out
GENERATING_SHARE = 0.15  # of the minutes, for writing
MAY_CHANGE = ("minutes", "muon_lr", "adam_lr", "compile", "save_every")  # when a run is resumed


def distill_drafter(
    target: TreeLM,
    tokenizer: Any,
    texts: Iterable[str],
    out: str | Path,
    settings: Settings | None = None,
    *,
    name: str | None = None,
    resume: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Train a drafter: a small Mamba-2, saved as transformers does, or a head, in the layout of speculators.

    Args:
        target: the model whose text is drafted.
        tokenizer: the target's, of transformers; it is saved beside the drafter.
        texts: documents, repeats left out; their end is held out and measured on.
        out: a new or empty folder.  What it gets: config, weights, tokenizer, README.md (the card), distill.json.
        settings: sizes, time and recipe.
        name: of the target, for the card.
        resume: go on with the unfinished run in ``out``; target, texts and settings must be the same.
        force: begin anew where ``out`` holds another run or drafter.

    Returns:
        What distill.json holds: held-out measures, tau, stages, settings.

    Raises:
        ValueError: too little text, a size outside its range, a stop token that the target does not have, a folder that
            holds something else or that another run writes into; nothing is written.
        RuntimeError: training diverged; the last checkpoint stays.
    """
    folder = RunFolder(out, resume=resume, force=force)
    settings = _sized(settings or Settings(), target)
    name = str(name or target.model.name_or_path or target.model.config.model_type)
    separator, special = _special_tokens(target, tokenizer)
    stream = encode(distinct(texts), tokenizer, target.vocab_size, separator)
    train_stream, held_out = hold_out(stream, settings.length)
    digest = hashlib.sha256(stream.tobytes()).hexdigest()[:16]
    weights = weights_digest(target.model)
    identity = {"target": name, "target_weights": weights, "vocab_size": target.vocab_size, "text": digest}
    recipe = {key: str(value) for key, value in asdict(settings).items()}
    about = {**identity, **{key: value for key, value in recipe.items() if key not in MAY_CHANGE}}
    drafter: Any = (
        new_head(target, settings.kind, settings.seed, settings.recipe)
        if settings.kind in HEADS
        else _new_model(target, settings, special)
    )
    with alone_in(folder.path):
        folder = RunFolder(out, resume=resume, force=force)  # another run may have come and gone since
        folder.claim(about)
        text = Corpus({"text": train_stream}, {"text": 1.0}, separator=separator)
        if isinstance(drafter, HeadNetwork):
            outputs = outputs_of(target, drafter.hidden_layers)
            stages, generated = fit_head(target, outputs, drafter, text, settings, folder.checkpoints, resume=resume)
        else:
            probs = probs_of(target.model, matmul_dtype(settings, target.device))
            stages, generated = fit(target, probs, drafter, text, settings, folder.checkpoints, resume=resume)
        measured = _saved_and_measured(target, drafter, tokenizer, folder.result, held_out, settings)
        metrics = {
            **identity, **_environment(target.device), **measured,
            "num_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
            "text_tokens": len(train_stream), "generated_tokens": generated, "stages": stages, "settings": recipe,
        }  # fmt: skip
        metrics["files"] = sorted({METRICS, "README.md", *(file.name for file in folder.result.iterdir())})
        with failures_named(folder.result):
            (folder.result / METRICS).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
            (folder.result / "README.md").write_text(card(metrics), encoding="utf-8")
        folder.publish()
        return metrics


def _new_model(target: TreeLM, settings: Settings, special: dict[str, Any]) -> PreTrainedModel:
    """Make a small Mamba-2 with random weights."""
    config = drafter_config(target.vocab_size, settings.hidden or 0, settings.layers, special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        check_forward(build(config), use_training_forward)
        return build(config).to(target.device)


def _saved_and_measured(
    target: TreeLM, drafter: Any, tokenizer: Any, folder: Path, held_out: np.ndarray, settings: Settings
) -> dict[str, Any]:
    """Save a drafter, load it and measure it on the held-out stream."""
    is_head = isinstance(drafter, HeadNetwork)
    with failures_named(folder):
        drafter.save(folder) if is_head else save_model(drafter, tokenizer, folder)
    if is_head:
        return {"tau": measure_tau(target, load(folder, target), held_out)}
    lm = TreeLM.from_pretrained(folder, device=target.device)
    exact, drafted = (probs_of(model, torch.float32) for model in (target.model, lm.model))
    probs = measure_probs(exact, drafted, held_out, settings.length, target.device)
    return {"held_out": probs, "tau": measure_tau(target, ModelDrafter(lm), held_out)}


def fit(
    target: TreeLM,
    probs: Logits,
    drafter: PreTrainedModel,
    text: Corpus,
    settings: Settings,
    folder: Path,
    *,
    resume: bool = False,
) -> tuple[dict[str, dict[str, float]], int]:
    """Train a drafter in place: on the text, then on the target's distributions.

    Args:
        target: what writes text of its own.
        probs: its logits; a faster form of the same model, perhaps.
        drafter: with or without training; its forward is replaced by the training one.
        text: to train on.
        settings: the recipe.
        folder: of the checkpoints.
        resume: go on with them.

    Returns:
        What each part did, and how many tokens the target wrote.
    """
    use_training_forward(drafter, matmul_dtype(settings, target.device), compiler(settings))
    first, writing, second = _plan(settings)
    batches = Batches(text, settings.length, settings.seed)
    stages = {"text": train(folder / "text.pt", drafter, text_loss(settings), batches, settings, first, resume=resume)}
    text, written = _with_generated(target, text, settings, folder / "generated.npz", writing, resume=resume)
    batches = Batches(text, settings.length, settings.seed + 1)
    loss = distill_loss(probs, settings)
    stages["distill"] = train(folder / "distill.pt", drafter, loss, batches, settings, second, resume=resume)
    return stages, written


def fit_head(
    target: TreeLM,
    outputs: Outputs,
    head: HeadNetwork,
    text: Corpus,
    settings: Settings,
    folder: Path,
    *,
    resume: bool = False,
) -> tuple[dict[str, dict[str, float]], int]:
    """Train a head in place on the target's distributions; ``outputs`` are the target's, the rest is as of ``fit``."""
    _, writing, budget = _plan(replace(settings, text_share=0.0))
    text, written = _with_generated(target, text, settings, folder / "generated.npz", writing, resume=resume)
    batches = Batches(text, settings.length, settings.seed)
    stage = train(folder / "head.pt", head, head_loss(outputs), batches, settings, budget, resume=resume)
    return {"distill": stage}, written


def save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Save configuration, generation configuration, bfloat16 weights and tokenizer."""
    copy = type(model)(type(model.config).from_dict(model.config.to_dict()))
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _plan(settings: Settings) -> tuple[Budget, Writing, Budget]:
    """Divide the budget: training on text, writing, and training on the target's distributions."""
    writing = Writing(settings.temperature, settings.seed, least=settings.length + 1, save_every=settings.save_every)
    if settings.steps is not None:
        first = int(settings.steps * settings.text_share)
        rest = settings.steps - first
        wanted = rest * settings.batch_size * settings.length * settings.generated
        return ("steps", first), replace(writing, tokens=math.ceil(wanted / GENERATED_PASSES)), ("steps", rest)
    seconds = 60 * settings.minutes
    spent = GENERATING_SHARE * seconds if settings.generated else 0.0
    on_text = settings.text_share * (seconds - spent)
    return ("seconds", on_text), replace(writing, seconds=spent), ("seconds", seconds - spent - on_text)


def _with_generated(
    target: TreeLM, text: Corpus, settings: Settings, path: Path, writing: Writing, *, resume: bool
) -> tuple[Corpus, int]:
    """Add what the target writes, with its share of the windows; return the number of its tokens, too."""
    share, whole = settings.generated, sum(text.shares.values())
    if not share:
        return text, 0
    generated = write_continuations(target, text, path, writing, resume=resume)
    shares = {kind: part * (1 - share) / whole for kind, part in text.shares.items()} | {"generated": share}
    passes = {**text.passes, "generated": GENERATED_PASSES}
    return Corpus({**text.streams, "generated": generated}, shares, passes, text.separator), len(generated)


def _sized(settings: Settings, target: TreeLM) -> Settings:
    """Choose the width where none is given; refuse windows that the target cannot run."""
    if target.max_length is not None and settings.length > target.max_length:
        raise ValueError(f"length must be at most the target's {target.max_length} positions, got {settings.length}")
    if settings.hidden is not None:
        return settings
    width = int(target.model.get_input_embeddings().weight.shape[1])
    return replace(settings, hidden=max(64, width // 2 // 32 * 32))


def _special_tokens(target: TreeLM, tokenizer: Any) -> tuple[int | None, dict[str, Any]]:
    """Find the token that separates documents, and the special tokens of the drafter's config."""
    config = target.model.config.get_text_config()
    stop = target.model.generation_config.eos_token_id if target.eos_token_ids else config.eos_token_id
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if stop == [] or any(not 0 <= token < target.vocab_size for token in stops):
        raise ValueError(
            f"eos_token_id of the target must be None or tokens of the target's {target.vocab_size}, got {stop}"
        )
    known = [tokenizer.eos_token_id, *stops]
    separator = next((token for token in known if token is not None and token < target.vocab_size), None)
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "pad_token_id")}
    return separator, {**ids, "eos_token_id": stop}


def _environment(device: torch.device) -> dict[str, str]:
    """Describe the machine and versions of a training run."""
    threads = f"{torch.get_num_threads()} CPU threads"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    return {"machine": machine, "torch": torch.__version__, "transformers": transformers.__version__}
