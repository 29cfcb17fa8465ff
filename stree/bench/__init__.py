"""``stree bench``: comparisons that a sceptic can run again.

It knows the library through its public interface; nothing of the library knows it.
"""
