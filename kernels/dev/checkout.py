"""Where the checkout is, for what only a checkout has: documents, committed records."""

from __future__ import annotations

from pathlib import Path

# kernels/dev/checkout.py, reached through the links below src/ or not.
ROOT = Path(__file__).resolve().parents[2]
