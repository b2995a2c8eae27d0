"""What services on engines share: tasks beside a body, one reader of an engine's messages, and reading bytes safely."""

from .mailroom import Mailroom

__all__ = ["Mailroom"]
