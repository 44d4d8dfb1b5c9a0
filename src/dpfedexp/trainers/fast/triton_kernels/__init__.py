"""What torch's own operations leave slow on a GPU, written for triton; imported only where triton is."""
