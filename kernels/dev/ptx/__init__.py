"""A software GPU: the PTX that Triton makes of a kernel, executed on the CPU with numpy, every access checked.

    text --parse--> Kernel --program--> Program --machine--> Launch          driver: Triton's launches end here

``parse.py`` reads the text. ``program.py`` turns each basic block into a Python function over all threads, with
``translate.py`` for what happens within a thread (``arithmetic.py`` holds its rounding) and ``units.py`` for the rest.
``machine.py`` schedules the threads, whose warps wait for each other as ``convergence.py`` says; ``lanes.py`` is what
warps do together, and ``tensor_copies.py`` and ``warp_groups.py`` are Hopper's asynchronous units; ``tcgen05.py``,
``tensor_memory.py`` and ``tensor_cores.py`` are Blackwell's. ``memory.py`` checks every access, and ``races.py`` those
to global memory against each other, by what ``accesses.py`` reads off the text. ``launch.py`` runs a grid under
``settings.py``. ``driver.py`` puts it behind Triton's driver, so that the package's own
launches arrive here; ``specialised.py`` checks their arguments against what was compiled.

With ``Settings.count`` ``counters.py`` counts what a launch does by line of PTX, ``counted.py`` sums it up, and
``assembled.py`` asks ptxas for the instructions of its machine code.

``__main__.py`` runs the ops' test cases, ``models.py`` those of models, and ``faults.py`` seeds faults into kernels,
which must be found. What is not modelled stands in docs/gpu.md.
"""
