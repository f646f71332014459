"""What the leaf ops compute where there are no kernels: bodies in torch's ops, for any device.

A body stands beside the fake of its op. It is given the results that the fake returns, which have
the shapes, strides and dtypes of the kernels' results, and writes them
(:func:`compile_losses.library.register_body`). So a body and a fake can't differ, and a body raises
what its fake refuses. Bodies of elementwise losses are made of the loss's reference, of which the
decomposition is made, too. Bodies of rows of logits compute with the statistics that the kernels
save, since shards and blocks of classes exchange these.

A body goes through its arguments in blocks, so that what it holds besides them does not grow with
them: in a linear layer's chunk loop it is no account of memory. Arithmetic is in the kernels'
types: float32, or float64 if an argument is float64; sums over blocks and rows are in float64,
where the device has that.
"""
