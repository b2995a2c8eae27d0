"""The messages of the soak: a line of JSON, and bytes behind it."""

from __future__ import annotations

import json
from typing import Any


def encode(kind: str, payload: bytes = b"", **fields: Any) -> bytes:
    """Write a message of a kind."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n" + payload


def decode(data: bytes) -> tuple[str, dict[str, Any], bytes]:
    """Return its kind, its fields and its payload."""
    line, _, payload = data.partition(b"\n")
    fields = json.loads(line)
    return fields.pop("kind"), fields, payload
