"""Which packages there are; everything else about the package is in pyproject.toml.

All of `src` is found, so a new folder needs no line here. `experiments/` lies outside `src`, where readers see it first,
and is installed as `dpfedexp.experiments`; pyproject.toml has no way to say that together with automatic discovery.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("src"), "dpfedexp.experiments"],
    package_dir={"": "src", "dpfedexp.experiments": "experiments"},
)
