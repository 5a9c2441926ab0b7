"""The packages of the wheel: `diloco`, and `configs/` as `diloco.config.contracts`. All else is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

CONTRACTS = "diloco.config.contracts"

setup(
    packages=[*find_namespace_packages(include=["diloco*"]), CONTRACTS],
    package_dir={CONTRACTS: "configs"},
)
