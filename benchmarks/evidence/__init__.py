"""Every recorded figure of the project that depends on a machine's speed, made again by one command.

``python -m benchmarks.evidence --help``; ``parts`` is the table of what is run.
"""
