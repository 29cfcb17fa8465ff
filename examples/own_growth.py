"""A growth and a stop rule of your own, checked: layers that halve in width, drawn while the draft model is sure."""

from dataclasses import dataclass

from transformers import AutoTokenizer

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


class Sure(Stop):
    def draws(self, values, dist):  # before tokens are drawn from float[batch, above, vocab]: which texts go on
        best = dist.topk(2, -1).values
        return ((best[..., 0] > 2 * best[..., 1]) & (values > 0)).any(1)


def main(max_new_tokens=64):
    print(stree.testing.check_growth(Stopped(Halving(2), Sure()), budget=4, seeds=[0]))
    assets = f"{stree.__path__[0]}/assets"
    lm, tokenizer = stree.TreeLM.from_pretrained(f"{assets}/target"), AutoTokenizer.from_pretrained(f"{assets}/target")
    prompt = tokenizer("def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n")["input_ids"]
    options = {"growth": Stopped(Halving(), Sure()), "budget": 8, "max_new_tokens": max_new_tokens}
    print(stree.generate(lm, [prompt], f"{assets}/drafter", **options).stats)


if __name__ == "__main__":
    main()
