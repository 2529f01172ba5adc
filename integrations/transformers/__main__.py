"""``python -m shardfuse.integrations.transformers serve MODEL --continuous-batching ...``

Run transformers' own command, with all of its options; every model that it loads is enabled before the first request.
Loading a model that cannot be enabled is an error. The command prints the counts of kernel calls when the server ends.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ..pages import stats
from . import HOST, UnsupportedHost, enable
from .contract import CONTRACT

USAGE = "usage: python -m shardfuse.integrations.transformers serve [MODEL] --continuous-batching [...]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run transformers' command line in this process. Returns 2 for arguments or a host that cannot be served."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["serve"]:
        return _refuse(USAGE)
    if not {"--continuous-batching", "--help"} & set(given):
        return _refuse("serve: add --continuous-batching: without it transformers keeps no pages to attend over")
    try:
        version = HOST.check(CONTRACT)
    except UnsupportedHost as error:
        return _refuse(str(error))
    try:
        app = importlib.import_module("transformers.cli.transformers").app
    except ModuleNotFoundError as error:
        needed = f"pip install 'transformers[serving]=={version}' {error.name}"
        return _refuse(f"serve: the command line of transformers {version} needs {error.name}: {needed}")
    enable_loaded_models()
    print(f"shardfuse: attention of what transformers {version} loads runs on our kernel", file=sys.stderr, flush=True)
    try:
        app(given, prog_name="transformers")
    finally:
        print(f"shardfuse: {stats('transformers')}", file=sys.stderr, flush=True)
    return 0


def enable_loaded_models() -> None:
    """Make ``transformers serve``, started later in this process, enable the models that it loads."""
    module: Any = importlib.import_module("transformers.cli.serving.model_manager")
    if not issubclass(module.ModelManager, _Enabling):
        module.ModelManager = type("ModelManager", (_Enabling, module.ModelManager), {})


class _Enabling:
    """Wraps transformers' manager of models."""

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        return enable(super()._load_model(*args, **kwargs))  # type: ignore[misc]


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
