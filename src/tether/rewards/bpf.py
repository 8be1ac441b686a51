"""Steps of classic BPF, the language of seccomp's filters.

Codes: linux/bpf_common.h and linux/seccomp.h.
"""

from __future__ import annotations

Step = tuple[int, int, int, int]
"""A step: (code, jump if true, jump if false, operand)."""

LOAD = 0x20
"""Take 32 bits of the call at a place: 0 is its number, 4 its machine, 16 its first argument."""
EQUAL = 0x15
AT_LEAST = 0x35
ONLY_BITS = 0x54
"""Take only these bits of what was loaded."""

ALLOW: Step = (0x06, 0, 0, 0x7FFF0000)
KILL: Step = (0x06, 0, 0, 0x80000000)
REFUSE: Step = (0x06, 0, 0, 0x50000 | 1)
"""The call ends with EPERM."""
UNKNOWN: Step = (0x06, 0, 0, 0x50000 | 38)
"""The call ends with ENOSYS."""
