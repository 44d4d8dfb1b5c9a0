"""Networks of known layers as hand-written tensor programs over many clients at once; on a GPU some layers use triton kernels.

Values have the client dimension first and the samples last, [n, …, s]: a convolution is then one matrix product per client whose
long side is contiguous. Values at positions, [n, positions, features, s], are stored in memory as [n, s, positions, features].
"""
