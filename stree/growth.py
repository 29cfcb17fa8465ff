"""The shape of a draft tree: which of the next tokens a drafter offers become nodes.

A growth is a policy over slots.  A slot is a place for one more child under a node; it has a rank among its siblings
and a value, the estimated probability that verification gets as far as testing it (also called reach).
Growths know no model: a drafter asks for a ``Plan`` and fills it layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from stree.sampling import Sampling

__all__ = ["Chain", "DySpec", "Growth", "Layer", "Plan", "Static", "choose_slots", "parse_growth"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One depth of a plan.

    Attributes:
        width: nodes of the layer, padding included.
        ranks: children offered by each node of the layer above.
        slots: the chosen slots, parent's place in its layer x ranks + rank, or None to choose by value.
    """

    width: int
    ranks: int
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a drafter needs to grow a tree with fixed shapes: a draft call a layer.

    Attributes:
        layers: from depth 1 down.
        num_nodes: most drafted nodes, the root not counted.
        threshold: a slot chosen by value needs at least this one, but for a layer's equal share of the nodes still
            to come, which is taken whatever its value: the budget is paid for anyway.
        is_pruned: deterministic children only: grow every layer to its width, keep the best ``num_nodes`` in the end.
        is_heap: one node a draft call, always at the slot of the greatest value.
    """

    layers: tuple[Layer, ...]
    num_nodes: int
    threshold: float = 0.0
    is_pruned: bool = False
    is_heap: bool = False


class Growth(Protocol):
    """A policy for growing trees."""

    @property
    def sampling(self) -> Sampling:
        """What children are drawn with."""
        ...

    def bind(self, sampling: Sampling) -> Growth:
        """Give this policy for children drawn under ``sampling``.

        At temperature 0 children are the top-k, kind DELTA.
        """
        ...

    def plan(self, budget: int) -> Plan:
        """Lay out a tree of at most ``budget`` nodes, root included.

        Raises:
            ValueError: a fixed shape larger than the budget.
        """
        ...


@dataclass(frozen=True)
class _Bound:
    """The sampling that a growth draws with."""

    sampling: Sampling = field(default=Sampling(), kw_only=True)

    def bind(self, sampling: Sampling) -> Self:
        """Give this policy for children drawn under ``sampling``."""
        return replace(self, sampling=sampling)


@dataclass(frozen=True)
class Static(_Bound):
    """A fixed tree.

    ``Static([3, 2])`` gives the root 3 children and each of them 2; ``Static([-1, 0, 0, 1])``, a list that starts with
    -1, names the parent of every node (SpecInfer and STree call it a token tree configuration).

    Args:
        shape: widths by depth, or parents.

    Raises:
        ValueError: an empty shape, a width below 1, or parents that are no tree in topological order.
    """

    shape: Sequence[int]

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        object.__setattr__(self, "shape", shape)
        if not shape:
            raise ValueError("Static needs widths or parents, got an empty list")
        if shape[0] != -1:
            if min(shape) < 1:
                raise ValueError(f"every width must be at least 1, got {list(shape)}")
        elif any(not 0 <= parent < node for node, parent in enumerate(shape[1:], 1)):
            raise ValueError(f"parents must name an earlier node each, got {list(shape)}")

    @classmethod
    def stree(cls) -> Static:
        """Make the 12-node, depth-4 tree of the STree paper's headline runs (arXiv 2505.14969)."""
        return cls([-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7])

    def plan(self, budget: int) -> Plan:
        """Lay out the tree; its nodes are ordered by depth."""
        layers = self._layers()
        nodes = sum(layer.width for layer in layers)
        if nodes + 1 > budget:
            raise ValueError(f"a tree of {nodes + 1} nodes (root included) exceeds the budget of {budget}")
        return Plan(tuple(layers), nodes)

    def _layers(self) -> list[Layer]:
        """Order nodes by depth and number their slots."""
        if self.shape[0] != -1:
            sizes = torch.tensor(self.shape).cumprod(0).tolist()
            return [Layer(size, ranks, tuple(range(size))) for size, ranks in zip(sizes, self.shape, strict=True)]
        above, layers = [0], []
        while above:
            children = [[node for node, parent in enumerate(self.shape) if parent == upper] for upper in above]
            ranks = max(map(len, children))
            slots = tuple(place * ranks + rank for place, nodes in enumerate(children) for rank in range(len(nodes)))
            above = [node for nodes in children for node in nodes]
            if above:
                layers.append(Layer(len(slots), ranks, slots))
        return layers


@dataclass(frozen=True)
class Chain(_Bound):
    """A tree without branches that drafts ``depth`` tokens (speculative decoding, arXiv 2211.17192)."""

    depth: int

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"a chain must draft at least 1 token, got depth {self.depth}")

    def plan(self, budget: int) -> Plan:
        """Lay out the chain."""
        return Static([1] * self.depth).plan(budget)


@dataclass(frozen=True)
class DySpec(_Bound):
    """A tree grown where the draft is sure (DySpec, arXiv 2410.11744).

    A slot's value is the product of the draft probabilities on its path times what its earlier siblings left.  The
    "layers" form takes, at every depth, the slots of value at least ``threshold``, best first, and where they are fewer
    than an equal share of the remaining budget, that share; slots are taken before their tokens are drawn, and what is
    drawn stays.  The "heap" form draws one node a draft call, at the best slot of the whole tree.  At temperature 0
    tokens are known beforehand, so the layers form keeps the nodes of the greatest path probability, as OPT-Tree
    (arXiv 2406.17276) and EAGLE-2 do.

    Args:
        depth: most draft calls of the layers form.
        width: most nodes of a layer, or None for the whole budget.
        ranks: most children of a node.
        threshold: least value of a slot, or None for 1 / budget.
        form: "layers" or "heap".

    Raises:
        ValueError: a size below 1, a threshold outside [0, 1), or an unknown form.
    """

    depth: int = 6
    width: int | None = None
    ranks: int = 4
    threshold: float | None = None
    form: str = "layers"

    def __post_init__(self) -> None:
        for name, size in (("depth", self.depth), ("width", self.width), ("ranks", self.ranks)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {self.threshold}")
        if self.form not in ("layers", "heap"):
            raise ValueError(f"form must be 'layers' or 'heap', got {self.form!r}")

    def plan(self, budget: int) -> Plan:
        """Lay out the widest tree that the budget allows."""
        nodes = budget - 1
        threshold = 1 / budget if self.threshold is None else self.threshold
        if self.form == "heap":
            return Plan((), nodes, threshold, is_heap=True)
        width = nodes if self.width is None else min(self.width, nodes)
        layers: list[Layer] = []
        above = 1
        for _ in range(self.depth if nodes else 0):
            above = min(width, above * self.ranks)
            layers.append(Layer(above, self.ranks))
        return Plan(tuple(layers), nodes, threshold, is_pruned=self.sampling.is_greedy)


def parse_growth(text: str) -> Growth:
    """Read a growth as the command line names it: dyspec, dyspec-heap, chain:4, static:3,2, stree.

    Raises:
        ValueError: an unknown name, or numbers that are none.
    """
    name, _, rest = text.partition(":")
    try:
        numbers = [int(number) for number in rest.split(",")] if rest else []
        if name == "chain" and len(numbers) == 1:
            return Chain(numbers[0])
        if name == "static" and numbers:
            return Static(numbers)
    except ValueError as error:
        raise ValueError(f"growth {text!r} cannot be read: {error}") from error
    plain: dict[str, Growth] = {"dyspec": DySpec(), "dyspec-heap": DySpec(form="heap"), "stree": Static.stree()}
    if text in plain:
        return plain[text]
    raise ValueError(f"growth must be dyspec, dyspec-heap, chain:DEPTH, static:WIDTH,WIDTH,... or stree, got {text!r}")


def choose_slots(layer: Layer, value: Tensor, left: Tensor, threshold: float, sure: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the slots of a layer.

    Args:
        layer: the plan's layer.
        value: float[batch, above x ranks], value of each slot; at most 0 where there is none.  Later siblings never
            have the greater value, so an earlier one is never passed over.
        left: int64[batch], nodes that the budget still allows.
        threshold: least value.
        sure: int64[batch], the best slots that are taken whatever their value.

    Returns:
        int64[batch, width] slots and bool[batch, width], whether each is taken.
    """
    if layer.slots is not None:
        index = torch.tensor(layer.slots, device=value.device).expand(value.shape[0], -1)
        return index, value.gather(1, index) > 0
    ordered, index = value.sort(dim=1, descending=True, stable=True)  # stable: an earlier sibling wins a tie
    ordered, index = ordered[:, : layer.width], index[:, : layer.width]
    rank = torch.arange(ordered.shape[1], device=value.device)
    is_worth = (ordered >= threshold) | (rank < sure[:, None])
    return index, (ordered > 0) & is_worth & (rank < left[:, None])
