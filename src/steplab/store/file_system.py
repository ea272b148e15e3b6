"""Whether a file is on a network file system, where SQLite's write-ahead log does not work between machines."""

import os
from pathlib import Path

_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afpfs", "afs", "webdav", "davfs", "9p", "virtiofs"),
    *("ceph", "lustre", "gpfs", "beegfs", "glusterfs", "orangefs", "panfs", "wekafs", "ocfs2", "gfs2"),
    *("sshfs", "s3fs", "rclone", "gcsfuse", "juicefs", "goofys", "ceph-fuse"),
}
"""Types of file systems that several machines, or a machine and its guest, may have open at once."""


def network_file_system(path: Path) -> str | None:
    """The type of the network file system that the path is on; None for a local one, or if it is not known."""
    import psutil  # type: ignore[import-untyped]  # only a writer asks

    try:
        mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    except (OSError, RuntimeError):  # no list of mounts in this container
        return None
    folder = Path(os.path.realpath(path))
    kind = next((mounted[str(parent)] for parent in (folder, *folder.parents) if str(parent) in mounted), "")
    return kind if kind.removeprefix("fuse.") in _NETWORK else None
