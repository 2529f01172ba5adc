"""Equal tokens, or not: small seeded models, what transformers' ``generate`` makes of them, and any server beside it.

``models.py`` writes a folder of each architecture with prompts and the tokens that are expected; ``server.py`` asks a
server that speaks OpenAI's completions; ``attention.py`` judges an attention function over a matrix of paged batches.
The command is ``shardfuse conformance``.
"""
