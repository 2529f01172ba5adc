"""The rivals that the project knows: each module defines a tuple ``RIVALS`` (``bench/harness/rivals.py``).

No GPU has run the adapters of Liger, quack, FlashInfer, vLLM and SGLang. They follow the signatures of the releases
that their modules name, tests call them with stand-ins of these, and the gate judges them wherever they run.
"""
