"""What each role may ask of a broker; who may do one thing may not thereby do another.

| role     | may                                              | may not |
| -------- | ------------------------------------------------ | ------- |
| actor    | hello, lease, beat, submit, release, fail, bye   | look at the run, revoke, drain |
| observer | status                                           | everything else |
| operator | status, revoke, drain                            | make episodes |

A message that is nobody's request is refused to all.
"""

from __future__ import annotations

from broker.protocol.messages import (
    BeatRequest,
    Bye,
    DrainRequest,
    FailRequest,
    Hello,
    LeaseRequest,
    Refusal,
    ReleaseRequest,
    RevokeRequest,
    StatusRequest,
    SubmitRequest,
)
from broker.transport.allow_list import Member, Role

RIGHTS: dict[Role, frozenset[type]] = {
    Role.ACTOR: frozenset(
        {Hello, LeaseRequest, BeatRequest, SubmitRequest, ReleaseRequest, FailRequest, Bye}
    ),
    Role.OBSERVER: frozenset({StatusRequest}),
    Role.OPERATOR: frozenset({StatusRequest, RevokeRequest, DrainRequest}),
}

DESK = (StatusRequest, RevokeRequest, DrainRequest)
"""Requests that `admin.py` answers; all others are for `service.py`."""


def refuse(member: Member, message: object) -> Refusal | None:
    """Say why a message is not for this peer to send; None if it is."""
    kind = type(message)
    if kind in RIGHTS[member.role]:
        return None
    roles = sorted(role for role, kinds in RIGHTS.items() if kind in kinds)
    if not roles:
        text = f"message must be a request to the broker, got {kind.__name__}"
        return Refusal("malformed", text)
    return Refusal(
        "role",
        f"{kind.__name__} must come from {' or '.join(roles)}, got the {member.role} "
        f"{member.name}; use a key of that role",
    )
