"""A verifier of your own, checked: it tests the eldest child of a node alone, as on a chain (arXiv 2211.17192)."""

import torch

import stree


class EldestChild(stree.verify.Verifier):
    def check(self, sampling):  # called before anything runs
        if sampling.min_p is not None:
            raise ValueError(f"EldestChild takes no min_p, got {sampling.min_p}")

    def __call__(self, tree, target_logits, sampling, rng, draft, max_depth):
        probs, rows = sampling.probs(target_logits), torch.arange(len(tree.tokens))
        node, length, left, path, goes_on = 0 * rows, 1 + 0 * rows, probs[:, 0], [0 * rows], rows >= 0
        for _ in range(max_depth):
            is_child = tree.parents == node[:, None]
            child, goes_on = is_child.int().argmax(1), goes_on & is_child.any(1)
            token = tree.tokens[rows, child]
            drawn = torch.nn.functional.one_hot(token, probs.shape[2]).to(probs.dtype)  # of a DELTA node
            if draft is not None:
                stated = draft.probs[rows, draft.row[rows, child].long()].to(probs.dtype)
                drawn = torch.where((draft.kind[rows, child] == stree.verify.DELTA)[:, None], drawn, stated)
            ratio = (left[rows, token] / drawn[rows, token]).clamp(max=1) * goes_on
            passes = rng.bernoulli("accept", ratio, 0 * rows, child)  # a number of its own for each node
            left = torch.where(passes[:, None], probs[rows, child], (left - drawn * goes_on[:, None]).clamp(min=0))
            goes_on, node, length = passes, torch.where(passes, child, node), length + passes
            path.append(torch.where(passes, child, -1))
        return stree.Acceptance(torch.stack(path, 1).int(), length.int(), rng.choice("target", left, length))


def main(tokens=64):
    print(stree.testing.check_verifier(EldestChild()))
    target, drafter = (f"{stree.__path__[0]}/assets/{name}" for name in ("target", "drafter"))
    options = {"verifier": EldestChild(), "sampling": stree.Sampling(0.8), "max_new_tokens": tokens}
    print(stree.generate(stree.TreeLM.from_pretrained(target), [[5, 6, 7]], drafter, **options).stats)


if __name__ == "__main__":
    main()
