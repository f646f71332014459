"""How the kernels in csrc/ become shared libraries, and what a wheel of them has to pass."""
