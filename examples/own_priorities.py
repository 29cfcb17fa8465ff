"""A growth of your own that learns, checked: priorities by rates of acceptance at each depth, for each text."""

from dataclasses import dataclass

import torch

import stree
from stree.growth import AcceptanceModel, BaseGrowth, Layer, Plan


@dataclass(frozen=True)
class ByDepth(BaseGrowth):
    depth: int = 4

    def plan(self, budget):
        return Plan((Layer(budget - 1, ranks=4),) * self.depth, num_nodes=budget - 1, threshold=0.05)

    def acceptance_model(self, batch, device):
        return DepthRates(super().acceptance_model(batch, device), torch.ones(2, batch, self.depth, device=device))


class DepthRates(AcceptanceModel):
    def __init__(self, base, counts):
        self.base, self.counts = base, counts  # of nodes that were reached and accepted: [2, batch, depth]

    def begin(self, plan, rng):  # a tree; `rate` is called once for each of its layers
        self.layer = 0

    def rate(self, slots):
        priorities, values = self.base.rate(slots)
        rate = (self.counts[1] / self.counts[0])[:, self.layer, None, None]
        self.layer += 1
        return priorities * rate, values * rate

    def read_text(self, tokens, path, lengths):  # the accepted path, just before `learn`; of a prompt path is None
        self.lengths = lengths

    def learn(self, proposal, ratios, is_live):
        depth, accepted = torch.arange(self.counts.shape[2]), self.lengths[:, None] - 1
        is_reached = (depth <= accepted) & (depth < proposal.tree.depths.amax(1, keepdim=True)) & is_live[:, None]
        self.counts += torch.stack([is_reached, is_reached & (depth < accepted)])

    def reset(self, row):  # another text takes the row
        self.counts[:, row] = 1

    def select(self, rows):
        return DepthRates(self.base.select(rows), self.counts[:, rows])


def main(max_new_tokens=64):
    print(stree.testing.check_growth(ByDepth(2), budget=4, seeds=[0]))
    assets = f"{stree.__path__[0]}/assets"
    lm = stree.TreeLM.from_pretrained(f"{assets}/target")
    print(stree.generate(lm, [[5, 6, 7]], f"{assets}/drafter", growth=ByDepth(), max_new_tokens=max_new_tokens).stats)


if __name__ == "__main__":
    main()
