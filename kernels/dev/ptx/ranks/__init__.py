"""Several virtual ranks in one emulation: the communicating kernels of ``kernels/comm``, compiled, over one memory.

    python -m shardfuse.kernels.dev.ptx.ranks --ranks 4 --op linear_all_reduce --schedule first-late

Each rank is a thread that runs the package's own calls; only the holder of the baton (``world.py``) runs. A launch
(``launch.py``) passes the baton on when all its threads wait for flags. Its accesses to symmetric memory carry vector
clocks (``clocks.py``), which releases and acquires join at a sufficient scope (``orders.py``): two accesses of which
one is a write, and which nothing orders, are reported. Stores to other ranks' memory are seen as late as the PTX memory
model allows. ``schedules.py`` says which rank, block and copy goes first; a wait that cannot end is a deadlock, with
its rank, kernel, block, line and flag. ``host.py`` runs the copy engines, ``programs.py`` has the calls and their
references, ``seeds.py`` the faults of the protocol that have to be found.
"""
