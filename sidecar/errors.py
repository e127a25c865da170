"""Errors of the sidecar that end more than one call: a start, an attachment.

Owns their classes. A message of either is for a person: it names the field, the value and the
remedy.
"""

from sidecar.protocol.codec import ProtocolError


class StartError(Exception):
    """The sidecar cannot start; the message says what an operator changes."""


class AttachRefused(ProtocolError):
    """This client will not be served; becomes a `Refused` with `code` and the message."""
