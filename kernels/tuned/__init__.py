"""Tables of measured configurations, one per chip: ``sm_90.json``. ``tuning.py`` reads them and has their format.

``shardfuse bench tune`` writes one. A chip without a table runs by the rules beside each kernel.
"""
