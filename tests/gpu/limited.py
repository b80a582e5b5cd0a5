"""Run a program for some seconds at most: ``limited.py SECONDS PROGRAM...`` or ``-m MODULE...``.

When it takes longer it ends with the stacks of all threads, so that mpirun and one_gpu.py, who
started it, end in an orderly way too.
"""

import faulthandler
import os
import runpy
import sys

seconds, program, *rest = sys.argv[1:]
faulthandler.dump_traceback_later(float(seconds), exit=True)
if program == "-m":
    sys.argv[:] = rest
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
else:
    sys.argv[:] = [program, *rest]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")
