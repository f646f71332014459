"""Benchmarks of the fused losses against torch and others: ``python -m benchmarks --help``.

``cases``       what is computed: inputs, the torch expression, the fused calls, bytes moved
``contenders``  who computes it
``accuracy``    every contender against float64, before it is timed
``clock``       how one call is timed on a device, and the device's own bandwidth
``measure``     all contenders of one problem, interleaved
``report``      CSV and table
``options``     what the command lines have in common
``plots``       bars against the floor, bars and lines of steps
``overhead``    eager calls against torch's, on 8 elements and on a million
``matrix``      compiled steps of ``heads`` and losses against stock torch.compile's

``linear`` and ``vocabulary_parallel`` measure a linear layer with its cross entropy, on one device
and on several; what they share is in ``linear_steps``, how ranks agree in ``ranks``.
"""
