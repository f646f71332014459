"""Programs and steps of users, run to be measured: what ``compare``, ``bisect`` and ``run`` do.

``compare`` itself is in :mod:`compile_losses.comparison`, whose names are public.
"""
