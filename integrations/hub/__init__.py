"""A build of our kernels for Hugging Face's ``kernels`` library: ``make hub-kernel``, docs/integrations.md.

``exports.py`` names what a build offers, ``layers.py`` and ``attention.py`` are what of it exists for transformers only.
``build.py`` writes the folder, of the modules that ``closure.py`` finds these to need.
"""
