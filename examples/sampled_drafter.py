"""A drafter of your own that draws, checked: two siblings, tokens as frequent as they are in the prompt."""

import torch

import stree


class FrequencyDrafter(stree.drafters.Drafter):
    uses_growth = False

    def start(self, vocab_size, prompts, rng):
        counts = torch.stack([torch.bincount(torch.tensor(prompt), minlength=vocab_size) + 0.01 for prompt in prompts])
        return FrequencyRun(counts / counts.sum(1, keepdim=True), torch.tensor([*map(len, prompts)]), rng)


class FrequencyRun(stree.drafters.DraftRun):  # what belongs to one generation
    def __init__(self, probs, lengths, rng):
        self.probs, self.lengths, self.rng = probs, lengths, rng

    def propose(self, pending, growth, budget):
        rng, zero = self.rng.at(self.lengths), torch.zeros_like(pending)  # the numbers of this step
        first = rng.choice("draft", self.probs, zero, 0)
        second = rng.choice("draft", self.probs.scatter(1, first[:, None], 0.0), zero, 1)  # another number and token
        parents = torch.tensor([[-1, 0, 0]] * len(pending))[:, :budget]  # both are children of the root, in draw order
        tree = stree.TokenTree(torch.stack([pending, first, second], 1)[:, :budget], parents)
        row = torch.zeros_like(tree.parents)  # siblings share a row: the verifier takes out the earlier one's token
        kind = torch.full_like(row, stree.verify.SAMPLED, dtype=torch.int8)
        return stree.drafters.Draft(tree, stree.DraftProbs(self.probs[:, None], row, kind), max_depth=1)

    def observe(self, acceptance):
        self.lengths = self.lengths + acceptance.path_lengths


def main(tokens=64):
    print(stree.testing.check_drafter(FrequencyDrafter(), vocab_size=3, budget=3))
    lm, at = stree.TreeLM.from_pretrained(f"{stree.__path__[0]}/assets/target"), stree.Sampling(0.8)
    print(stree.generate(lm, [[5, 6]], FrequencyDrafter(), budget=3, sampling=at, max_new_tokens=tokens).stats)


if __name__ == "__main__":
    main()
