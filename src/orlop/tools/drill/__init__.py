"""The fire drill: does a training command that is killed and started again end as one that never was?

`kills` decides when, `processes` ends a process tree, `runs` starts and watches a command, `elsewhere` finds what it
left outside of its directory (`surroundings`: where it looks, and what does not count), `comparison` holds two runs
against each other, `drilling` is the whole story.
"""
