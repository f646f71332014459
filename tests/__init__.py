import os
from pathlib import Path

# A thread that waits for another keeps no core busy. Otherwise a small product waits eight
# milliseconds on a machine with other work. OpenMP reads this when torch loads it, here and in the
# processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The compiler is taken to know this processor's instructions. In each empty cache Inductor would
# otherwise try them, in a dozen runs of the compiler and of Python.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

#: The checkout. The package need not lie in it: a wheel's tests run in a copy without.
ROOT = Path(__file__).parent.parent

#: For the environment of processes that compile a few small loops: the compiler takes less time for
#: loops without vector instructions.
WITHOUT_VECTORS = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
