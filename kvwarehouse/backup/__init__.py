"""Backup and move of a warehouse's namespaces: out of one daemon into a file or a pipe, and from
there into another daemon, of this or of another identity.

Pages travel by what they are of, token ids or an engine's keys, never by their chain keys: those
are made with a secret of each warehouse, and the target makes its own.

    backup_file.py  the file: records in a tar, each with a digest; docs/format.md
    chains.py       the pages of a namespace as a tree, in the order in which they travel
    listing.py      what a namespace has when its turn comes
    exporting.py    daemon -> file
    importing.py    file -> daemon
    target.py       the daemon's namespaces, for those of the file
    room.py         what the target can take without evicting
"""

from kvwarehouse.backup.backup_file import BackupReader, BackupWriter, new_file
from kvwarehouse.backup.exporting import Export, ExportCounts
from kvwarehouse.backup.importing import Import, ImportCounts
from kvwarehouse.backup.target import Target
from kvwarehouse.rate_limit import RateLimit

__all__ = [
    "BackupReader",
    "BackupWriter",
    "Export",
    "ExportCounts",
    "Import",
    "ImportCounts",
    "RateLimit",
    "Target",
    "new_file",
]
