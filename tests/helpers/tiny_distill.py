"""A small run of distillation, and the token that ends a text in it."""

from stree.distill import Settings

END = 0
SETTINGS = Settings(
    hidden=16, layers=1, steps=6, batch_size=2, length=16, generated=0.25, adam_lr=2e-2, save_every=0.0
)  # fmt: skip
