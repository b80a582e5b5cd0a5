"""``fp4comm`` as a script, for launchers that tests start."""

from fp4comm.cli import main

main()
