"""What the graph that Dynamo captured is: its tensors and memory, seen as ATen ops and evaluated.

Nothing here knows a loss. The modules of the other rooms, ``spellings`` and ``heads``, are written
with these.
"""
