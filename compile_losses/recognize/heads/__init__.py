"""Linear layers and what reads their logits: losses, metrics and outputs of the graph.

An op takes the layer with its readers, so that the logits are never held, or a reader takes a few
statistics of each row of logits that are held.
"""
