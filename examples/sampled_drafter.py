"""A drafter of your own that draws, checked: chains of two tokens, as frequent as they are in the text so far."""

import torch

import stree


class FrequencyDrafter(stree.drafters.Drafter):
    def start(self, vocab_size, prompts, rng):
        counts = torch.stack([torch.bincount(torch.tensor(prompt), minlength=vocab_size) for prompt in prompts])
        return FrequencyRun(counts + 0.01, torch.tensor([len(prompt) for prompt in prompts]), rng)


class FrequencyRun(stree.drafters.DraftRun):  # what belongs to one generation
    def __init__(self, counts, lengths, rng):
        self.counts, self.lengths, self.rng = counts, lengths, rng

    def propose(self, pending, growth, budget):
        rng, zero = self.rng.at(self.lengths), torch.zeros_like(pending)  # the numbers of this step
        probs, count = self.counts / self.counts.sum(1, keepdim=True), min(budget - 1, 2)
        drawn = [rng.choice("draft", probs, zero, node) for node in range(count)]  # a number of its own for each node
        self.tree = stree.TokenTree.chain(torch.stack([pending, *drawn], 1))
        row = torch.zeros_like(self.tree.parents)  # all nodes were drawn (SAMPLED, 0) from one distribution, row 0
        return stree.drafters.Draft(self.tree, stree.DraftProbs(probs[:, None], row, row.to(torch.int8)), count)

    def observe(self, acceptance):
        self.lengths = self.lengths + acceptance.path_lengths
        tokens = self.tree.tokens.gather(1, acceptance.path.clamp(min=0).long())
        self.counts = self.counts.scatter_add(1, tokens, (acceptance.path >= 0) * 1.0)


def main(tokens=64):
    print(stree.testing.check_drafter(FrequencyDrafter(), vocab_size=3, budget=3))
    lm = stree.TreeLM.from_pretrained(f"{stree.__path__[0]}/assets/target")
    sampling = stree.Sampling(0.8)
    print(stree.generate(lm, [[5, 6]], FrequencyDrafter(), budget=3, sampling=sampling, max_new_tokens=tokens).stats)


if __name__ == "__main__":
    main()
