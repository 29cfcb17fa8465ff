"""``stree bench``: benchmarks of whole generations.

It uses the library through its public interface, and no other part of the library imports it.
"""
