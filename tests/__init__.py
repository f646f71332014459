from pathlib import Path

#: The checkout. The package need not lie in it: a wheel's tests run in a copy without.
ROOT = Path(__file__).parent.parent
