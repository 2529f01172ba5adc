"""A software GPU: the PTX that Triton makes of a kernel, executed on the CPU with numpy, every access checked.

    text --parse--> Kernel --program--> Program --machine--> Launch          driver: Triton's launches end here

``parse.py`` reads the text. ``program.py`` turns each basic block into a Python function over all threads, with
``translate.py`` for what happens within a thread (``arithmetic.py`` holds its rounding) and ``units.py`` for the rest.
``machine.py`` schedules the threads and holds what warps do together (``lanes.py``), ``memory.py`` checks every access,
``barriers.py``, ``tensor_copies.py`` and ``warp_groups.py`` are Hopper's asynchronous units. ``launch.py`` runs a grid;
``driver.py`` puts it behind Triton's driver, so that the package's own launches arrive here.

What is not modelled stands in docs/gpu.md.
"""
