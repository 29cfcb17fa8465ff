"""Use of stree from other libraries."""
