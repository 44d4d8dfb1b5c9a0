"""Networks of known layers as hand-written tensor programs over many clients at once.

ops.py, convolution.py      what a layer does, with a parameter set per client
kernels.py, pooled_kernels.py   the same for GPUs: patches, GroupNorm, dropout; convolution and max-pool in one
trace.py                    from an nn.Module to a list of operations, where every layer has a rule
program.py                  the list with what is frozen, and one gradient through it, from the loss on

Values carry the client dimension first and the samples last, [n, …, s]: a convolution is then one product of matrices per client
whose long side is contiguous, and everything else is elementwise over long rows. Values at positions, [n, positions, features, s],
lie in memory as rows of features, [n, s, positions, features]. `trainers/steps.py` does with the gradients what a step does.
"""
