"""Benchmarks of the fused losses against torch and others: ``python -m benchmarks --help``.

``cases``       the problems: inputs, the torch expression, the fused calls, bytes moved
``contenders``  the implementations that are compared
``accuracy``    every contender against float64, before it is timed
``clock``       timing of one call on a device, and the device's bandwidth
``measure``     all contenders of one problem, interleaved
``report``      CSV and table
``options``     the common options of the command lines
``plots``       bars against the floor, bars and lines of steps
``overhead``    eager calls against torch's, on 8 elements and on a million
``matrix``      compiled steps of ``heads`` and losses against stock torch.compile's

``linear`` and ``vocabulary_parallel`` measure a linear layer with its loss, on one device and on
several. They share ``linear_steps``; ``ranks`` lets ranks agree, and
``vocabulary_parallel_contenders`` has what the second compares.
"""
