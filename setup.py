"""Computes the list of packages; everything else is in pyproject.toml.

setuptools can map ``shardfuse.kernels`` to the folder ``kernels`` but cannot discover sub-packages through such
a map, and a list kept by hand goes stale silently. A test builds the wheel and looks for every module in it.
"""

from setuptools import find_packages, setup

FLOORS = ("kernels", "parallel", "layers", "training", "serving", "bench")


def packages() -> list[str]:
    names = ["shardfuse"]
    for floor in FLOORS:
        names.append(f"shardfuse.{floor}")
        names += [f"shardfuse.{floor}.{sub}" for sub in find_packages(floor)]
    return names


setup(packages=packages())
