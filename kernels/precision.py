"""How far float32 results of the kernels may be off on a GPU: a bound from how they multiply and add."""

from __future__ import annotations

from stree.kernels.tiles import interpreted

__all__ = ["float32_tolerance"]

# tf32x3 writes an operand as two numbers of 11 bits and leaves out the product of the two small ones: 2^-20 of a
# product for the rest of each operand and for what is left out.
PRODUCT = 3 * 2.0**-20
# A matrix instruction adds 8 such products to a float32 sum and truncates it, three times for each 8.
STEP, TERMS_A_STEP = 2.0**-23, 8 / 3


def float32_tolerance(terms: int) -> float:
    """Bound the error of a sum of so many products as a share of the largest result.

    Under the interpreter sums are NumPy's, and 1e-5 holds for all.  The bound is doubled because sums on the way may
    exceed the largest result.  Products in plain TF32, which keep 11 bits of each operand, are 3e-4 off: up to some
    thousand terms the bound tells them apart.

    Args:
        terms: products in the longest chain of sums, one after the other.
    """
    if interpreted():
        return 1e-5
    return max(1e-5, 2 * (PRODUCT + STEP * terms / TERMS_A_STEP))
