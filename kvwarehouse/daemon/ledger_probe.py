"""Reads a ledger file in a process that may die of it, and prints what it holds.

LMDB trusts its file: a truncated or flipped one can kill the process that maps it (measured:
truncated, 40 of 40 by SIGBUS). The daemon therefore never reads a ledger through LMDB; it runs this
file by its path, as a child with a time limit, and imports nothing of kvwarehouse here.

Output: for every record, two u32 (little-endian) with the lengths of key and value, and the two;
at the end, two u32 of 0xffffffff. Anything shorter is a ledger that could not be read. Exit status
DAMAGED when LMDB says so itself.
"""

import struct
import sys

import lmdb

LENGTHS = struct.Struct("<II")
END = LENGTHS.pack(0xFFFFFFFF, 0xFFFFFFFF)
DAMAGED = 65


def main(path: str) -> None:
    out = sys.stdout.buffer
    environment = lmdb.open(path, subdir=False, readonly=True, lock=False, create=False)
    with environment.begin() as transaction:
        for key, value in transaction.cursor():
            out.write(LENGTHS.pack(len(key), len(value)) + key + value)
    out.write(END)
    out.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except lmdb.Error as error:
        print(error, file=sys.stderr)
        sys.exit(DAMAGED)
