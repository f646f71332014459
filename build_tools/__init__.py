"""The build of the kernels in csrc/ as shared libraries, and the checks of a wheel."""
