"""`python -m orlop.cli`."""

from orlop.cli import main

main()
