"""What this repository has measured, to be measured again: the paper, real federations, benchmarks. See README.md."""
