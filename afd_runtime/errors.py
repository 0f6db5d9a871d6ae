# SPDX-License-Identifier: Apache-2.0
"""Every error that the runtime raises. All of them are ``AFDError``; most are a built-in error as well."""

from __future__ import annotations


class AFDError(RuntimeError):
    """Anything that the AFD runtime refuses or that failed in it."""


def one_line(error: BaseException) -> str:
    """The error in one line of at most 1000 characters; one that is not of this module with its type."""
    text = " ".join(str(error).split())
    return (text if isinstance(error, AFDError) and text else f"{type(error).__name__}: {text}")[:1000]


class AFDConfigError(AFDError, ValueError):
    """A configuration or an argument that cannot work. The text names the value, what is allowed and the next step."""


class AFDCapacityError(AFDError, ValueError):
    """More rows than a slot holds; raised before anything is written."""


class AFDRefusedError(AFDError):
    """The other side refused to register or attach this process.

    field: what differs, as the fingerprint calls it (``max_batch_tokens``, ``token``, ``machine``, …).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class AFDProtocolError(AFDError):
    """A message or a signal that this protocol does not allow at this place."""


class AFDShutdownError(AFDError):
    """The FFN side of this process was asked to stop: there is no further step."""


class AFDStuckError(AFDError):
    """A kernel of this process does not end. Its GPU memory cannot be given back; the process has to end."""


class NoControlPlaneError(NotImplementedError, AssertionError):
    """The FFN loop was given a connector whose ``control_plane`` is None."""


class AFDStepError(AFDError):
    """A step that failed. peer: its name; layer: of the model, or None before the first; stage; step: of the lane."""

    def __init__(self, what: str, *, peer: str, layer: int | None, stage: int, step: int) -> None:
        where = "before its first layer" if layer is None else f"at layer {layer}"
        super().__init__(f"{peer} {what} ({where}, stage {stage}, step {step})")
        self.peer, self.layer, self.stage, self.step = peer, layer, stage, step


class AFDPeerLost(AFDStepError):  # noqa: N818  the name that the field knows
    """A peer's process ended, fell silent or shut down."""


class AFDTimeoutError(AFDStepError, TimeoutError):
    """A peer lives but did not answer within the limit."""


class AFDStepAborted(AFDStepError):  # noqa: N818  as above
    """The peer gave this step up and said why. Later steps may succeed."""


class AFDAttachError(AFDError, TimeoutError):
    """The group, or one of its ranks, did not answer in time when this process wanted to join."""
