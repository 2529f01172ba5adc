"""transformers' causal language models over the engine's own pages, fused or stock.

``Served`` (``served.py``) calls the model's own forward with the tokens of all sequences in one row. Its layers reach
``PagedBatch.attend`` in one of two ways: the attention function that transformers looks up by its name
(``attention.py``), or for models that have their own attention a forward of ours (``own.py``). Both find this thread's
step in ``step.py``, which also undoes a pass's changes to the model. ``limits.py`` refuses models that cannot be
served; ``probe.py`` runs a few tokens before serving and compares the results with the stock forward.

Letters: T tokens of a step, N query heads, K KV heads, H head size of keys, Hv of values, V vocabulary, R ranks.
"""

from __future__ import annotations

from typing import Any


def is_foreign(model: Any) -> bool:
    """Whether ``model`` is one of transformers' models; the check does not import transformers."""
    kinds = [(base.__module__, base.__name__) for base in type(model).__mro__]
    return ("transformers.modeling_utils", "PreTrainedModel") in kinds
