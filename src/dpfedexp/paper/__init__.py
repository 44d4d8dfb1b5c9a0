"""The paper, reproduced: its tables and figures, each from one function."""
