"""``python -m fp4comm``."""

from fp4comm.cli import main

main()
