"""Shipped profiles of links, one per chip: ``sm_90.json``. ``link_profile.py`` reads them and has their format.

Figures of GPUs are published ones, each with its source; ``shardfuse bench calibrate`` measures a node's own. MI300X
has none: its links go from GPU to GPU, so that what a collective gets depends on how many share it.
"""
