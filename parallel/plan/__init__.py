"""The planner: which layout a model should have on a cluster, what it holds in memory, and how long a step takes.

``shapes.py`` says what a model is, ``hardware.py`` what a cluster is and ``layout.py`` how the one is spread over the
other; ``memory.py`` and ``step_time.py`` predict, ``search.py`` enumerates layouts, and ``check.py`` holds the
predictions against published runs.
"""
