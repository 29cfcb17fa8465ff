"""What ``custom_generate/generate.py`` of a folder runs, which ``stree export-generate`` writes.

transformers imports that file for ``model.generate(custom_generate=FOLDER, trust_remote_code=True)``, and for a model
that is loaded from the folder with ``trust_remote_code=True``, as ``transformers serve`` loads it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from stree.drafters import Drafter, load
from stree.integrations.transformers import custom_generate, tree_lm

__all__ = ["SETTINGS", "generate_with"]

SETTINGS = ("drafter", "growth", "budget", "verifier")
_loading = threading.Lock()  # threads that ask at once get one drafter


def generate_with(model: PreTrainedModel, inputs: Tensor | None, options: Mapping[str, Any]) -> Any:
    """Run ``model.generate(inputs, **options)`` with token trees; text and refusals are ``stree.custom_generate``'s.

    Args:
        model: of a supported family.
        inputs: int64[batch, length], or None where the options have ``input_ids``.
        options: of transformers' ``generate``, and ``drafter``, ``growth``, ``budget``, ``verifier`` and ``seed``: the
            drafter and the growth may be names.  A drafter that is named is loaded once for a model.

    Returns:
        What ``generate`` returns.
    """
    options = {name: value for name, value in options.items() if value is not None}
    options["drafter"] = _drafter(model, options.get("drafter", "suffix"))
    hook = partial(custom_generate, tokenizer=options.pop("tokenizer", None))
    generate = partial(type(model).generate, model, custom_generate=hook)  # the model's own may be replaced by this
    ids = inputs if inputs is not None else options.pop("input_ids", None)
    criteria = options.get("stopping_criteria")
    if not criteria or ids is None or len(ids) == 1:
        return generate(ids, **options)
    filler = _padding_token(options, options.get("generation_config"), model.generation_config)
    rows = _one_by_one(generate, ids, options.pop("attention_mask", torch.ones_like(ids)), options)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)


def _padding_token(options: Mapping[str, Any], *configs: Any) -> int:
    """Return the token with which transformers pads texts that have ended: an end-of-text token where none is named."""
    for name in ("pad_token_id", "eos_token_id"):
        for token in (options.get(name), *(getattr(config, name, None) for config in configs)):
            if token is not None:
                return int(torch.as_tensor(token).flatten()[0])
    return 0


def _drafter(model: PreTrainedModel, drafter: Any) -> Drafter:
    """Load a drafter; one that is named is kept with what else is kept for the model, until its files change."""
    lm = tree_lm(model)
    if not isinstance(drafter, str):
        return load(drafter, lm)
    with _loading:
        kept: dict[str, tuple[Any, Drafter]] = lm.cache.setdefault("exported drafters", {})
        folder = Path(drafter.removeprefix("fused:"))
        files = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*"))
        if drafter not in kept or kept[drafter][0] != files:
            kept[drafter] = files, load(drafter, lm)
        return kept[drafter][1]


def _one_by_one(generate: Any, ids: Tensor, mask: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Generate for each row of a batch alone: criteria may look at all rows of a batch, as those of lm_eval do."""
    if options.get("return_dict_in_generate"):
        raise NotImplementedError("a batch with stopping criteria returns token ids, not return_dict_in_generate")
    criteria, seed = options.pop("stopping_criteria"), options.pop("seed", None)
    rows: list[Tensor] = []
    for row in range(len(ids)):
        if seed is not None:
            options["seed"] = seed + row  # or rows of equal prompts would be the same
        own = StoppingCriteriaList([_EveryRow(criterion, len(ids)) for criterion in criteria])
        rows += generate(ids[row : row + 1], attention_mask=mask[row : row + 1], stopping_criteria=own, **options)
    return rows


class _EveryRow(StoppingCriteria):  # type: ignore[misc]
    """Shows a criterion of a batch a text as every row of it.

    A criterion may have a list with an entry for each row, which says which of them have ended; its lists are copied.
    """

    def __init__(self, criterion: Any, rows: int) -> None:
        self._criterion, self._rows = copy.copy(criterion), rows
        for name, value in getattr(criterion, "__dict__", {}).items():
            if isinstance(value, list):
                setattr(self._criterion, name, [*value])

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        found = self._criterion(input_ids.expand(self._rows, -1), scores, **options)
        return torch.as_tensor(found, device=input_ids.device).reshape(-1)[:1]
