"""Networks of known layers as hand-written tensor programs over many clients at once; on a GPU some layers by triton's kernels.

Values carry the client dimension first and the samples last, [n, …, s]: a convolution is then one product of matrices per client
whose long side is contiguous. Values at positions, [n, positions, features, s], lie in memory as [n, s, positions, features].
"""
