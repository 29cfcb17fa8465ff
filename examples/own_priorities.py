"""A dynamic growth of your own, checked: nodes grow on only if their path is near the likeliest one of their depth."""

from dataclasses import dataclass

import stree
from stree.growth import AcceptanceModel, BaseGrowth, Layer, Plan


@dataclass(frozen=True)
class Near(BaseGrowth):
    factor: float = 20.0
    depth: int = 6

    def plan(self, budget):  # no slots are named, so they are taken by priority
        return Plan((Layer(budget - 1, ranks=4),) * self.depth, num_nodes=budget - 1, threshold=0.05)

    def acceptance_model(self, batch, device):
        return NearModel(super().acceptance_model(batch, device), self.factor)


class NearModel(AcceptanceModel):
    def __init__(self, base, factor):
        self.base, self.factor = base, factor

    def rate(self, slots):  # values of the nodes above: float[batch, above]
        priorities, values = self.base.rate(slots)
        is_near = slots.values * self.factor >= slots.values.amax(1, keepdim=True)
        return priorities * is_near[..., None], values


def main(max_new_tokens=64):
    print(stree.testing.check_growth(Near(factor=1.2, depth=2), budget=4, seeds=[0]))
    assets = f"{stree.__path__[0]}/assets"
    lm = stree.TreeLM.from_pretrained(f"{assets}/target")
    print(stree.generate(lm, [[5, 6, 7]], f"{assets}/drafter", growth=Near(), max_new_tokens=max_new_tokens).stats)


if __name__ == "__main__":
    main()
