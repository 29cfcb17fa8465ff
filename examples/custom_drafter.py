"""A drafter of your own: what followed the last two tokens at their earlier occurrences, merged into one tree."""

import sys

from transformers import AutoTokenizer

import stree


class LookupDrafter(stree.drafters.Drafter):  # for one sequence at a time, to be short
    uses_growth = False

    def start(self, vocab_size, prompts, rng):
        return LookupRun(prompts[0])


class LookupRun(stree.drafters.DraftRun):  # what belongs to one generation
    def __init__(self, prompt):
        self.text = list(prompt)

    def propose(self, pending, growth, budget):
        text = [*self.text, int(pending)]  # the pending token is the root of the tree
        ends = [i for i in range(len(text) - 1, 1, -1) if text[i - 2 : i] == text[-2:]][:3] or [len(text)]
        self.tree = stree.TokenTree.from_paths(text[-1:] + text[i : i + (budget - 1) // 3] for i in ends)
        return stree.drafters.Draft(self.tree, probs=None, max_depth=int(self.tree.depths.max()))

    def observe(self, acceptance):
        self.text += self.tree.tokens[0, acceptance.path[0, : acceptance.path_lengths[0]].long()].tolist()


def main(max_new_tokens=64):
    folder = f"{stree.__path__[0]}/assets/target"
    lm, tokenizer = stree.TreeLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n")["input_ids"]
    out = stree.generate(lm, [prompt], LookupDrafter(), budget=16, max_new_tokens=max_new_tokens)
    print(tokenizer.decode(out.sequences[0]), f"\n{out.stats['tau']:.2f} tokens a step")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
