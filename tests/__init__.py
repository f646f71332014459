from pathlib import Path

#: The checkout. The package need not lie in it: a wheel's tests run in a copy without.
ROOT = Path(__file__).parent.parent

#: For the environment of processes that compile a few small loops, most of all in an empty cache:
#: Inductor then does not look for vector instructions, which takes it a dozen runs of the compiler
#: and of Python.
WITHOUT_VECTORS = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
