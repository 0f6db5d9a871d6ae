# SPDX-License-Identifier: Apache-2.0
"""Fused Triton kernels for Mixture-of-Experts layers, whole or split between attention and FFN ranks.

Everything exported here is public. Importing this package touches no GPU. A wrong argument raises ``ValueError``, which
names it and says what is allowed (``TypeError`` where it is no tensor).
"""

from afd_kernels.arrival import ExpertSchedule, arrival, new_schedule, schedule_bytes
from afd_kernels.combine import combine
from afd_kernels.dispatch import dispatch, dispatch_workspace
from afd_kernels.experts import SwiGLU, experts_forward, experts_workspace
from afd_kernels.launch import GemmConfig, pick, pick_experts
from afd_kernels.layer import fused_experts, fused_experts_workspace, fused_moe
from afd_kernels.message import (
    MODE_OFFLINE,
    MODE_ONLINE,
    Header,
    Lane,
    MessageLayout,
    ReplyLayout,
    signal_word,
    split_word,
    tensor_at,
)
from afd_kernels.reply import REPLY_WORKSPACE, reply
from afd_kernels.routing import route, route_workspace, top_k_from_logits
from afd_kernels.signal import wait
from afd_kernels.signal_host import Status, StatusCode
from afd_kernels.step import INBOX_FIELDS, StepMember, begin_step, enter_step, fill_inbox, leave_step
from afd_kernels.support import supported

__all__ = [
    "INBOX_FIELDS",
    "MODE_OFFLINE",
    "MODE_ONLINE",
    "REPLY_WORKSPACE",
    "ExpertSchedule",
    "GemmConfig",
    "Header",
    "Lane",
    "MessageLayout",
    "ReplyLayout",
    "Status",
    "StatusCode",
    "StepMember",
    "SwiGLU",
    "arrival",
    "begin_step",
    "combine",
    "dispatch",
    "dispatch_workspace",
    "enter_step",
    "experts_forward",
    "experts_workspace",
    "fill_inbox",
    "fused_experts",
    "fused_experts_workspace",
    "fused_moe",
    "leave_step",
    "new_schedule",
    "pick",
    "pick_experts",
    "reply",
    "route",
    "route_workspace",
    "schedule_bytes",
    "signal_word",
    "split_word",
    "supported",
    "tensor_at",
    "top_k_from_logits",
    "wait",
]
