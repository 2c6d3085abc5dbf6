"""/dev/shm, where batches in flight lie; statvfs counts files that are unlinked but open, too."""

from __future__ import annotations

import os


def shm_free() -> int:
    """Free bytes; 0 where there is no /dev/shm."""
    stat = _stat()
    return 0 if stat is None else stat.f_bavail * stat.f_frsize


def shm_used() -> int:
    """Used bytes; 0 where there is no /dev/shm."""
    stat = _stat()
    return 0 if stat is None else (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def _stat() -> os.statvfs_result | None:
    try:
        return os.statvfs("/dev/shm")
    except OSError:
        return None
