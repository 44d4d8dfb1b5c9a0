"""Networks of known layers as hand-written tensor programs over many clients at once.

ops.py, convolution.py, normalise.py, pooling.py   what a layer does, forward and backward, with a parameter set per client
trace.py                                           from an nn.Module to a list of such operations, where every layer has a rule
program.py                                         one gradient step of all clients of a tile
trainer.py                                         the local update of a chunk, tile by tile
tune.py                                            which trainer and which tile, by measurement

Values carry the client dimension first and the samples last, [n, …, s]: a convolution is then one product of matrices per client
whose long side is contiguous, and everything else is elementwise over long rows.
"""
