"""What people do with checkpoints outside of training: look, verify, compare, convert, prune, drill.

Tools return findings and never print (`cli` does). `opened`, `overview`, `plain_records`, `key_rules`, `check` and
`prune` need no torch; the others say so by importing it.
"""
