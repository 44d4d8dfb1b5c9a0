"""`make release`: both files, built twice, installed where there is no source tree, and what goes with them."""
