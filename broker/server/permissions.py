"""Permissions: the requests that a broker accepts from each role; no role includes another.

| role      | may                                              | may not |
| --------- | ------------------------------------------------ | ------- |
| actor     | hello, lease, beat, submit, release, fail, bye   | status, revoke, drain |
| enrolment | enrol                                            | everything else |
| observer  | status                                           | everything else |
| operator  | status, revoke, drain                            | make episodes |

A message that is no request of any role is refused to all.
"""

from __future__ import annotations

from broker.protocol.messages import (
    BeatRequest,
    Bye,
    DrainRequest,
    Enrol,
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

PERMISSIONS: dict[Role, frozenset[type]] = {
    Role.ACTOR: frozenset(
        {Hello, LeaseRequest, BeatRequest, SubmitRequest, ReleaseRequest, FailRequest, Bye}
    ),
    Role.ENROLMENT: frozenset({Enrol}),
    Role.OBSERVER: frozenset({StatusRequest}),
    Role.OPERATOR: frozenset({StatusRequest, RevokeRequest, DrainRequest}),
}

ADMIN_REQUESTS = (StatusRequest, RevokeRequest, DrainRequest, Enrol)
"""Requests that `admin.py` answers; all others are for `service.py`."""


def check_permission(member: Member, message: object) -> Refusal | None:
    """Return the refusal of a message that this member may not send; None if it may."""
    kind = type(message)
    if kind in PERMISSIONS[member.role]:
        return None
    roles = sorted(role for role, kinds in PERMISSIONS.items() if kind in kinds)
    if not roles:
        text = f"message must be a request to the broker, got {kind.__name__}"
        return Refusal("malformed", text)
    return Refusal(
        "role",
        f"{kind.__name__} must come from {' or '.join(roles)}, got the {member.role} "
        f"{member.name}; use a key of that role",
    )
