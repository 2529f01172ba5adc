"""Shipped profiles of links, one per chip: ``sm_90.json``. ``link_profile.py`` reads them and has their format.

GPUs have published figures, each with its source; ``shardfuse bench calibrate`` measures a node's own. MI300X has no
profile: its links connect pairs of GPUs, so the rate of a collective depends on how many ranks share it.
"""
