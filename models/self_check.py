"""Checks that trees are scored as the model's own code scores texts.

An adapter repeats a mixer's forward, so a release of transformers that changes that forward must be noticed.
``check_adapters`` compares one layer of each class with its own forward; a class that has passed is remembered on disk
until transformers, torch, triton, its source, an adapter, a kernel, the kind of device or the dtype changes, or another
package serves its forward.
"""

from __future__ import annotations

import copy
import inspect
import logging
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from stree.kernels.dispatch import as_on_device
from stree.models.bounded_scan import memory_bounded
from stree.models.checks import DTYPES
from stree.models.families import cache_argument
from stree.models.layers.attention import KvSpec
from stree.models.layers.mla import LatentSpec
from stree.models.passed_checks import digest_of, has_passed, record_passed
from stree.models.patched_model import PatchedModel
from stree.models.patching import is_sharded, unpatch_forward
from stree.models.prefill import run_prompts
from stree.models.state import DecodeState
from stree.models.tree_scorer import TreeScorer
from stree.tree import TokenTree

__all__ = ["check_adapters", "check_model", "layer_errors", "model_error"]

# Three trees with commits between them.
PARENTS = ([-1, 0, 0, 1, 1, 2, 3, 3], [-1, 0, 1, 0, 3, 4, 4, 2], [-1, 0, 1, 2, 3, 0, 5, 6])
PATHS = ([0, 1, 3, 6], [0, 3, 4, 5], [0, 1])
VOCAB, WINDOW = 50, "sliding_window"
# Of the largest output.  Sums run in another order; on a GPU, mamba-ssm and fla round to TF32, too.
LAYER_BOUND, MODEL_BOUND, GPU_BOUND = 1e-4, 1e-3, 1e-2
HALF_LAYER_BOUND, HALF_BOUND = 0.1, 0.3  # of a model's median node: where a router is near a tie, all may differ

logger = logging.getLogger("stree")


def check_adapters(lm: PatchedModel, *, force: bool = False) -> None:
    """Compare a layer of each class that holds a state with its own forward.

    Args:
        lm: the model; it is not run.
        force: whether classes that have passed before are checked, too, and failures to run are raised.

    Raises:
        NotImplementedError: a class computes something else than its adapter; the message names it.
    """
    for kind, (layer, module) in _one_of_each_class(lm).items():
        weight = next(module.parameters())
        digest = digest_of(kind, weight.device, weight.dtype)
        if digest is not None and not force and has_passed(digest):
            continue
        try:
            error, bound = _layer_error(lm, layer, module)
        except Exception as reason:
            if force:
                raise
            logger.warning("%s could not be compared with its own forward: %s", kind.__name__, reason)
            continue
        if not error < bound:
            raise NotImplementedError(
                f"{kind.__name__} of transformers {transformers.__version__} computes something else than trees would: "
                f"relative error {error:.1e}; use a release for which stree was tested, or undo a change of its forward"
            )
        if digest is not None:
            record_passed(digest)


def layer_errors(lm: PatchedModel) -> dict[str, tuple[float, float]]:
    """Compare as ``check_adapters`` does; return relative error and bound by class name.

    Raises:
        Exception: what a layer that cannot be run alone raises.
    """
    return {kind.__name__: _layer_error(lm, *found) for kind, found in _one_of_each_class(lm).items()}


def check_model(lm: TreeScorer) -> None:
    """Compare the logits of three trees with those after the same texts.

    Raises:
        RuntimeError: they differ.
    """
    error, bound = model_error(lm)
    if not error < bound:
        raise RuntimeError(
            f"trees and the model's own forward disagree: relative error {error:.1e} of the logits, and less than "
            f"{bound:.0e} is expected of {lm.dtype}"
        )


@torch.no_grad()
def model_error(lm: TreeScorer) -> tuple[float, float]:
    """Return the relative error of the logits of three trees, and the bound of it."""
    state, text = lm.new_state(1, 32, 8), [lm.vocab_size // (node + 2) for node in range(9)]

    def run_texts(texts: list[list[int]]) -> Tensor:
        tokens, lengths = _right_padded(texts, lm.device)
        return run_prompts(lm, lm.new_state(len(texts), 32, 8), tokens, lengths.tolist())[0]

    run_prompts(lm, state, torch.tensor([text], device=lm.device), [len(text)])
    errors = _node_errors(lm, state, text, lm.vocab_size, run_texts)
    is_half = lm.dtype.itemsize == 2
    error = max(statistics.median(tree) if is_half else max(tree) for tree in errors)
    return error, HALF_BOUND if is_half else MODEL_BOUND if lm.device.type == "cpu" else GPU_BOUND


def _one_of_each_class(lm: PatchedModel) -> dict[type, tuple[int, Any]]:
    """Return layer and module of the first of each class that holds a state and has whole, plain weights."""
    found: dict[type, tuple[int, Any]] = {}
    for (layer, _), module in lm.mixers.items():
        weights = [*module.parameters()]
        if not (is_sharded(module) or any(weight.is_meta or weight.dtype not in DTYPES for weight in weights)):
            found.setdefault(type(module), (layer, module))
    return found


def _layer_error(lm: PatchedModel, layer: int, module: Any) -> tuple[float, float]:
    """Return the relative error of a layer, in float32 if its own forward takes that, and the bound of it."""
    weight = next(module.parameters())
    wide = torch.promote_types(weight.dtype, torch.float32)
    try:
        with weight.device:  # not a default device of the caller's, on which transformers would make its constants
            error = _error_of(_OneLayer(lm, layer, module, wide))
        return error, LAYER_BOUND if weight.device.type == "cpu" else GPU_BOUND
    except Exception:  # as kernels for half precision alone raise
        if weight.dtype == wide:
            raise
    with weight.device:
        return _error_of(_OneLayer(lm, layer, module, weight.dtype)), HALF_LAYER_BOUND


class _OneLayer(TreeScorer):
    """A copy of one stateful module in some dtype, with random vectors as embeddings and its outputs as logits."""

    def __init__(self, lm: PatchedModel, layer: int, module: Any, dtype: torch.dtype) -> None:
        self._layer, self._module, model = layer, _plain_copy(module, dtype), lm.model
        spec = lm.family.patch(self._module, layer, dtype)
        self.specs, self.mixers = {(layer, type(spec)): spec}, {(layer, type(spec)): self._module}
        self.family, self.num_layers = SimpleNamespace(takes_positions=True), 1  # type: ignore[assignment]
        children = model.get_decoder().named_children()
        rotary = next((child for name, child in children if "rotary" in name or name == "pos_emb"), None)
        self._rotary = None if rotary is None else _plain_copy(rotary, torch.float32).to(spec.device)
        self._layer_type = (getattr(model.config, "layer_types", None) or [None] * (layer + 1))[layer]
        width = next(part.in_features for part in self._module.modules() if hasattr(part, "in_features"))
        vectors = torch.randn(VOCAB, width, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        self._vectors = vectors.to(spec.device, spec.dtype)

    def check_state(self, state: DecodeState) -> None:
        """Check nothing."""

    def check_tokens(self, tokens: Tensor) -> None:
        """Check nothing."""

    def new_state(self, *_: Any, **__: Any) -> DecodeState:
        """Allocate a state that defers commits where the layer can."""
        state = DecodeState(self.specs, 1, 32, 8, self._vectors.device, defers_commit=True)
        state.bind(self.mixers)
        return state

    def forward(self, input_ids: Tensor | None, cache: Any, positions: Any, *_: Any, **__: Any) -> Tensor:
        """Run the module on float[batch, n, width] vectors; its own forward where there is no cache."""
        x, names = self._vectors[input_ids], _parameters(self._module)
        given = {"position_ids": positions, "layer_idx": self._layer, "use_cache": False, "position_embeddings": None}
        if self._rotary is not None and "position_embeddings" in names:
            kinds = {"layer_type": self._layer_type} if "layer_type" in _parameters(self._rotary) else {}
            axes = positions.expand(3, -1, -1) if hasattr(self._rotary, "mrope_section") else positions
            given["position_embeddings"] = self._rotary(x, axes, **kinds)
        given["attention_mask"] = None if cache is not None else self._mask(x)
        given[cache_argument(type(self._module))] = cache
        takes_any = any(one.kind is one.VAR_KEYWORD for one in names.values())
        with memory_bounded():
            out = self._module(x, **{name: value for name, value in given.items() if name in names or takes_any})
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    def run_texts(self, texts: list[list[int]]) -> Tensor:
        """Run the module's own forward on texts; return its last outputs."""
        tokens, lengths = _right_padded(texts, self._vectors.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(texts), -1)
        return self.forward(tokens, None, positions)[range(len(texts)), lengths - 1]

    def _mask(self, x: Tensor) -> Tensor | None:
        """Return what transformers' model would pass to attention: a causal mask within the window."""
        if not isinstance(next(iter(self.specs.values())), (KvSpec, LatentSpec)):
            return None
        index = torch.arange(x.shape[1], device=x.device)
        distance = index[:, None] - index
        code = getattr(inspect.unwrap(type(self._module).forward), "__code__", None)
        # A config may name a window of which the module's forward knows nothing.
        owner = self._module if hasattr(self._module, WINDOW) else self._module.config
        window = getattr(owner, WINDOW, None) if WINDOW in str(code and (code.co_names, code.co_consts)) else None
        is_hidden = (distance < 0) | (distance >= (window or x.shape[1]))
        return x.new_zeros(1, 1, *distance.shape).masked_fill(is_hidden, torch.finfo(x.dtype).min)


def _parameters(module: Any) -> Any:
    """Return the names of the arguments of a class's forward."""
    return inspect.signature(type(module).forward).parameters


def _plain_copy(module: Any, dtype: torch.dtype) -> Any:
    """Copy a module in a dtype, without patches, hooks and other libraries' forwards."""
    attributes = (value for part in module.modules() for value in vars(part).values())
    with_graph = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    copied = copy.deepcopy(module, {id(value): value.detach() for value in with_graph})
    for part in copied.modules():
        unpatch_forward(part)
        for name in ("forward", "_old_forward", "_hf_hook"):
            part.__dict__.pop(name, None)
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    if hasattr(copied, "config"):
        copied.config = copy.copy(copied.config)
        copied.config._attn_implementation_internal = "eager"
    if dtype.itemsize > 2:  # else it has the dtypes that it needs
        copied = copied.to(dtype)
    if hasattr(copied, "decay_factors"):  # MiniMax's tables of decays, which half precision has rounded one by one
        copied.query_decay, copied.key_decay, copied.diagonal_decay = copied.decay_factors(copied.slope_rate)
    return copied


@torch.inference_mode(False)
@torch.no_grad()
@as_on_device(triton=False, host_can_read=True)
def _error_of(lm: _OneLayer) -> float:
    """Return the largest relative error of three trees on a layer."""
    state = lm.new_state()
    with torch.autocast(state.lengths.device.type, enabled=False):
        return max(max(errors) for errors in _node_errors(lm, state, [], VOCAB, lm.run_texts))


def _node_errors(
    lm: TreeScorer, state: DecodeState, text: list[int], vocab: int, run_texts: Callable[[list[list[int]]], Tensor]
) -> list[list[float]]:
    """Verify three trees with commits between them; return the relative errors of the nodes of each.

    Args:
        lm: scores the trees.
        state: of one sequence, holds the text.
        text: its tokens.
        vocab: tokens below it are drawn.
        run_texts: returns the right outputs after each of several texts, [texts, width].
    """
    errors, device = [], state.lengths.device
    for number, (parents, path) in enumerate(zip(PARENTS, PATHS, strict=True)):
        tokens = [(7919 * node + 104729 * number + 13) % vocab for node in range(len(parents))]
        tree = TokenTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))
        texts = [[*text, *(tokens[step] for step in _path_to(parents, n))] for n in range(len(parents))]
        both = torch.stack((lm.verify(state, tree)[0], run_texts(texts))).double()
        found, right = both.masked_fill(both == -torch.inf, 0)  # tokens that a head leaves out
        scale = right.abs().max().clamp(min=1e-30)  # all zeros are equal
        errors.append(((found - right).abs().amax(1) / scale).nan_to_num(torch.inf).tolist())
        lm.commit(state, torch.tensor([path], device=device), torch.tensor([len(path)], device=device))
        text = [*text, *(tokens[node] for node in path)]
    return errors


def _right_padded(texts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return int64[texts, longest] tokens and int64[texts] lengths."""
    longest = max(map(len, texts))
    rows = [[*text, *[0] * (longest - len(text))] for text in texts]
    return torch.tensor(rows, device=device), torch.tensor([*map(len, texts)], device=device)


def _path_to(parents: list[int], node: int) -> list[int]:
    """List the nodes from the root down to a node."""
    return [*([] if parents[node] < 0 else _path_to(parents, parents[node])), node]
