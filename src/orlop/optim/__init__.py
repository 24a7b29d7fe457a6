"""Optimizers whose state lives in host memory.

The story of a step, top to bottom: `swap` makes the class; `proof` decides how it may be run; `probe` learns
which state it keeps; `arena` owns that state's memory; `windows` plans what travels together; `link` carries
it; `stepping` runs the class's own update on what has arrived; `adopt` loads a state dict into the arena in
place."""
