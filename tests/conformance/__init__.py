"""compile_losses.functional against torch.nn.functional: every option, mode and corner.

``python -m tests.conformance`` runs all of it and writes docs/conformance.md.
"""
