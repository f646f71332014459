"""Losses of tensors in all their spellings: torch's calls, and what is written out instead.

What makes the tensors is not asked here: linear layers are in ``heads``.
"""
