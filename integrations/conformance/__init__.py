"""Compare the tokens of any server with those of transformers' ``generate``, on small seeded models.

``models.py`` writes a folder of each architecture with prompts and expected tokens; ``server.py`` queries a server with
OpenAI's API; ``attention.py`` checks an attention function over a matrix of paged batches. The command is ``shardfuse
conformance``.
"""
