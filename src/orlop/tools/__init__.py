"""What people do with checkpoints outside of training: look, verify, compare, convert, prune, drill.

Tools return findings and never print (`cli` does). Those behind `ls`, `inspect`, `verify` and `prune` need no torch;
the list of them in `pyproject.toml` is enforced.
"""
