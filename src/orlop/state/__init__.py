"""The state of a run: its parts by name, what a checkpoint has of them, and putting it in place."""
