"""Layers of fast programs for GPUs, written for triton; imported where triton is."""
