"""What kernels share: step sizes, exact sums of decays, ancestors, and the integers that no build depends on."""

# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# These change from step to step.  Triton would build a kernel anew where one is 1 or, first, a multiple of 16.
STEP_INTEGERS = ("n", "first", "new_from", "known", "path_size")


@triton.jit
def softplus(raw):
    """Compute log(1 + e^raw); the quotient restores the digits that 1 + e^raw rounds away (Kahan)."""
    power = tl.exp(tl.minimum(raw, 20.0))
    above = power + 1.0
    lost = above - 1.0
    small = tl.log(above) * (power / tl.where(lost == 0.0, 1.0, lost))
    return tl.where(raw > 20.0, raw, tl.where(lost == 0.0, power, small))


@triton.jit
def split_decay(log_decay):
    """Split log decays into a part whose sums are exact and a rest below 2^-11.

    e^-105 is 0 in float32, so clamping there loses nothing; 128 multiples of 2^-10 down to -105 sum to less than 2^24
    such steps, which float32 adds without error in any order.
    """
    bounded = tl.maximum(log_decay, -105.0)
    coarse = tl.floor(bounded * 1024.0 + 0.5) * 0.0009765625
    return coarse, bounded - coarse


@triton.jit
def is_ancestor(bits_ptr, descendant, ancestor, n, WORDS: tl.constexpr):
    """Read bit `ancestor` of row `descendant`; the two broadcast against each other; False outside the tree."""
    bits = tl.load(bits_ptr + descendant * WORDS, mask=descendant < n, other=0)
    found = (ancestor // 32 == 0) & (((bits >> (ancestor % 32)) & 1) != 0)
    for word in tl.static_range(1, WORDS):
        bits = tl.load(bits_ptr + descendant * WORDS + word, mask=descendant < n, other=0)
        found = found | ((ancestor // 32 == word) & (((bits >> (ancestor % 32)) & 1) != 0))
    return found
