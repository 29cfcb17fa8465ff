"""A growth and a stop rule of your own, checked: layers that halve in width, drawn while the draft model is sure."""

from dataclasses import dataclass

import stree
from stree.growth import BaseGrowth, Layer, Plan, Stop, Stopped


@dataclass(frozen=True)
class Halving(BaseGrowth):
    width: int = 4

    def plan(self, budget):
        widths = [self.width >> depth for depth in range(self.width.bit_length())]
        if sum(widths) + 1 > budget:
            raise ValueError(f"{self} has {sum(widths) + 1} nodes, above the budget of {budget}")
        below_root = Layer(widths[0], ranks=widths[0], slots=tuple(range(widths[0])))
        layers = [Layer(width, ranks=1, slots=tuple(range(width))) for width in widths[1:]]  # eldest children
        return Plan((below_root, *layers), num_nodes=sum(widths), is_fixed=True)


@dataclass(frozen=True)
class Sure(Stop):
    factor: float = 2.0

    def draws(self, values, dist):  # before tokens are drawn from float[batch, above, vocab]: which texts go on
        best = dist.topk(2, -1).values
        return ((best[..., 0] > self.factor * best[..., 1]) & (values > 0)).any(1)


def main(max_new_tokens=64):
    print(stree.testing.check_growth(Stopped(Halving(2), Sure()), budget=4, seeds=[0]))
    assets = f"{stree.__path__[0]}/assets"
    lm = stree.TreeLM.from_pretrained(f"{assets}/target")
    options = {"growth": Stopped(Halving(), Sure()), "budget": 8, "max_new_tokens": max_new_tokens}
    print(stree.generate(lm, [[5, 6, 7]], f"{assets}/drafter", **options).stats)


if __name__ == "__main__":
    main()
