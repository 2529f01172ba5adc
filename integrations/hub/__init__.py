"""A build of our kernels for Hugging Face's ``kernels`` library: ``make hub-kernel``, docs/integrations.md.

``exports.py`` names what a build offers; ``layers.py`` and ``attention.py`` are the part of it that only transformers
calls. ``build.py`` writes the folder, of the modules that ``closure.py`` finds these to need.
"""
