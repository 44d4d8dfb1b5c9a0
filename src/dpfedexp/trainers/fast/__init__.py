"""Networks of known layers as hand-written tensor programs over many clients at once.

ops.py, convolution.py, normalise.py, pooling.py  what a layer does, forward and backward, with a parameter set per client
attention.py                                      self-attention by heads, and LayerNorm at positions
triton_kernels                                    the same for GPUs: convolution and max-pool in one, patches, normalisation
objective.py                                      where the backward pass starts: the gradient of the loss
rules.py, trace.py, rewrite.py                    from an nn.Module to a list of operations, where every layer has a rule
program.py                                        the list with what is frozen, and one gradient through it

Values carry the client dimension first and the samples last, [n, …, s]: a convolution is then one product of matrices per client
whose long side is contiguous, and everything else is elementwise over long rows. Values at positions, [n, positions, features, s],
lie in memory as rows of features, [n, s, positions, features]. What is done with the gradients is the business of
`trainers/stepping.py`.
"""
