"""`python -m lily` is the `lily` command."""

from .cli import main

main()
